// All runs, newest first. Rows outside the screen are not in the document.
import { useComputed, useSignal } from '@preact/signals';
import { useEffect, useMemo, useRef } from 'preact/hooks';
import { toValue, type Run } from '../api.ts';
import { formatAgo, formatDuration, formatNumber, formatStep } from '../format.ts';
import { followLink, runHref } from '../router.ts';
import { RunsModel } from '../run/runs.ts';
import { nowS } from '../ui/clock.ts';
import { Icon } from '../ui/icons.tsx';
import { Empty } from '../ui/menu.tsx';
import { StateBadge } from '../ui/state.tsx';
import { windowOf } from '../ui/window.ts';

const STATES = ['running', 'finished', 'failed', 'crashed', 'lost'] as const;
const ROW_PX = 40;

const LOOP = `import gradiometer as gm

with gm.init(project="my-project") as run:
    run.watch(model, optimizer)
    for batch in loader:
        run.log({"train/loss": step(batch)})`;

export function RunsPage() {
  const model = useMemo(() => new RunsModel(), []);
  useEffect(() => { model.start(); document.title = 'Runs · Gradiometer'; return () => model.stop(); }, [model]);
  const runs = model.runs.value;
  const isFiltered = model.search.value !== '' || model.state.value !== '';
  return (
    <main class="runs">
      <div class="page-title">
        <h1>Runs</h1>
        <label class="search"><Icon name="search" /><span class="visually-hidden">Search runs</span>
          <input type="search" placeholder="Search by name, project or tag" value={model.search.value} onInput={(event) => model.filter(event.currentTarget.value, model.state.value)} /></label>
        <label><span class="visually-hidden">State</span>
          <select value={model.state.value} onChange={(event) => model.filter(model.search.value, event.currentTarget.value)}>
            <option value="">all states</option>{STATES.map((state) => <option key={state} value={state}>{state}</option>)}
          </select></label>
        {runs && <span class="muted count">{formatStep(runs.length)}{model.cursor.value ? '+' : ''} {runs.length === 1 ? 'run' : 'runs'}</span>}
      </div>
      {model.error.value && <p class="notice bad" role="status">Could not load the runs: {model.error.value} <button type="button" onClick={() => void model.load()}>Retry</button></p>}
      {!runs && !model.error.value && <p class="muted" role="status">Loading…</p>}
      {runs && runs.length > 0 && <Table runs={runs} />}
      {runs && runs.length > 0 && model.cursor.value && <p class="more"><button type="button" disabled={model.loading.value} onClick={() => void model.more()}>{model.loading.value ? 'Loading…' : 'Load more'}</button></p>}
      {runs?.length === 0 && (isFiltered ? <Empty title="No run matches"><p class="muted">Try another word or state.</p></Empty> : <Start />)}
    </main>
  );
}

function Start() {
  const here = new URL('./', document.baseURI).href.replace(/\/$/, '');
  return (
    <Empty title="No runs yet">
      <p class="muted">Put this around your training loop. The run appears here within a second.</p>
      <pre tabIndex={0}><code>{LOOP}</code></pre>
      <p class="muted">Start it with <code>GRADIOMETER_URL={here}</code>, or see one at once with <code>gradiometer demo</code>.</p>
    </Empty>
  );
}

function Table({ runs }: { runs: readonly Run[] }) {
  const box = useRef<HTMLTableSectionElement>(null);
  const scroll = useSignal({ top: 0, height: innerHeight });
  useEffect(() => {
    const read = (): void => { scroll.value = { top: -(box.current?.getBoundingClientRect().top ?? 0), height: innerHeight }; };
    read();
    addEventListener('scroll', read, { passive: true });
    addEventListener('resize', read);
    return () => { removeEventListener('scroll', read); removeEventListener('resize', read); };
  }, []);
  const shown = useComputed(() => windowOf(scroll.value.top, scroll.value.height, ROW_PX));
  const first = Math.min(shown.value.first, Math.max(0, runs.length - 1));
  const last = Math.min(shown.value.last, runs.length);
  return (
    <div class="table-box">
      <table class="runs-table" aria-rowcount={runs.length + 1}>
        <thead><tr><th>State</th><th>Run</th><th class="wide">Project</th><th class="num mid">Step</th><th class="num">Loss</th><th class="num wide">Duration</th><th>Alerts</th><th class="num wide">Started</th></tr></thead>
        <tbody ref={box}>
          {first > 0 && <tr class="pad" aria-hidden="true"><td colSpan={8} style={{ height: `${first * ROW_PX}px` }} /></tr>}
          {runs.slice(first, last).map((run, i) => <Row key={run.id} run={run} index={first + i + 2} />)}
          {last < runs.length && <tr class="pad" aria-hidden="true"><td colSpan={8} style={{ height: `${(runs.length - last) * ROW_PX}px` }} /></tr>}
        </tbody>
      </table>
    </div>
  );
}

function Row({ run, index }: { run: Run; index: number }) {
  const loss = toValue(run.latest['train/loss']);
  const end = run.finished_s ?? (run.state === 'running' ? nowS.value : run.updated_s);
  return (
    <tr aria-rowindex={index} data-run={run.id}>
      <td><StateBadge state={run.state} /></td>
      <td class="run-link"><a href={runHref(run.id)} onClick={followLink}>{run.name}</a>{run.tags.slice(0, 3).map((tag) => <span class="tag" key={tag}>{tag}</span>)}</td>
      <td class="wide muted project">{run.project}</td>
      <td class="num mid">{run.last_step === null ? '–' : formatStep(run.last_step)}</td>
      <td class={`num ${loss !== null && !Number.isFinite(loss) ? 'bad' : ''}`}>{loss === null ? '–' : formatNumber(loss)}</td>
      <td class="num wide">{formatDuration(end - run.created_s)}</td>
      <td><AlertCount alerts={run.alerts} /></td>
      <td class="num wide muted" title={new Date(run.created_s * 1000).toLocaleString()}>{formatAgo(run.created_s, nowS.value)}</td>
    </tr>
  );
}

function AlertCount({ alerts }: { alerts: Run['alerts'] }) {
  if (!alerts?.total) return <span class="muted">–</span>;
  if (!alerts.firing) return <span class="muted">{alerts.total}</span>;
  return <span class="badge bad"><Icon name="alert" />{alerts.firing} firing<span class="mid">{alerts.total > alerts.firing ? ` / ${alerts.total}` : ''}</span></span>;
}
