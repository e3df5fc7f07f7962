// One run: how it goes, what is wrong, where in the network, and every metric.
import { useComputed, useSignal } from '@preact/signals';
import { useEffect, useMemo } from 'preact/hooks';
import type { Alert, Run } from '../api.ts';
import { cleanRange } from '../charts/axis.ts';
import { ChartCard } from '../charts/ChartCard.tsx';
import { FlowCard } from '../charts/FlowCard.tsx';
import { HeatCard } from '../charts/HeatCard.tsx';
import { formatDuration, formatStep } from '../format.ts';
import { followLink, runsHref } from '../router.ts';
import { LayerView } from '../run/layers.ts';
import { RunModel } from '../run/model.ts';
import { sectionsOf, type Section } from '../run/sections.ts';
import { AlertBanner, AlertList } from '../ui/Alerts.tsx';
import { nowS } from '../ui/clock.ts';
import { Icon } from '../ui/icons.tsx';
import { Empty } from '../ui/menu.tsx';
import { RunNotes } from '../ui/RunNotes.tsx';
import { StateBadge } from '../ui/state.tsx';

const ZOOM_STEPS_AROUND_ALERT = 60;

export function RunPage({ id }: { id: string }) {
  const model = useMemo(() => new RunModel(id), [id]);
  const layers = useMemo(() => new LayerView(model.layersStep), [model]);
  useEffect(() => { model.start(); return () => model.stop(); }, [model]);
  useEffect(() => { if (model.run.value) document.title = `${model.run.value.name} · Gradiometer`; }, [model.run.value?.name]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent): void => { if (event.key === 'Escape' && !document.querySelector('dialog[open]')) model.zoomTo(null); };
    addEventListener('keydown', onKey);
    return () => removeEventListener('keydown', onKey);
  }, [model]);

  if (!model.ready.value) return <Waiting model={model} />;
  return (
    <main class="run">
      <RunHeader model={model} />
      {model.error.value && <p class="notice bad" role="status">Could not refresh: {model.error.value}</p>}
      <RunAlerts model={model} />
      {model.hasLayers.value && <div class="insight"><HeatCard model={model} view={layers} /><FlowCard model={model} view={layers} /></div>}
      <Charts model={model} />
      <RunNotes model={model} />
    </main>
  );
}

function Waiting({ model }: { model: RunModel }) {
  if (!model.error.value) return <main class="run"><h1 class="visually-hidden">Run</h1><p class="muted" role="status">Loading the run…</p></main>;
  return (
    <main class="run">
      <h1 class="visually-hidden">Run</h1>
      <Empty title="This run could not be loaded">
        <p role="alert">{model.error.value}</p>
        <p><button type="button" onClick={() => model.refresh()}>Try again</button> <a href={runsHref()} onClick={followLink}>All runs</a></p>
      </Empty>
    </main>
  );
}

const endOf = (run: Run, now: number): number => run.finished_s ?? (run.state === 'running' ? now : run.updated_s);

function howItEnded(run: Run): string | null {
  if (run.state === 'running' || run.state === 'finished' || !run.exit) return null;
  const { signal, code, reason, exception } = run.exit;
  const because = exception ?? (reason === run.state || reason === 'signal' || (signal && reason?.includes(signal)) ? null : reason);
  return [signal, code === null ? null : `exit code ${code}`, because].filter(Boolean).join(' · ') || null;
}

function RunHeader({ model }: { model: RunModel }) {
  const run = model.run.value!;
  const stepS = Number(run.latest['time/step_s'] ?? NaN);
  const speed = run.state === 'running' ? model.speed.value ?? (stepS > 0 ? 1 / stepS : null) : null;
  const ended = howItEnded(run);
  return (
    <div class="run-header">
      <div class="run-name">
        <StateBadge state={run.state} />
        <h1>{run.name}</h1>
        {run.tags.map((tag) => <span class="tag" key={tag}>{tag}</span>)}
        {ended && <span class="ended">{ended}</span>}
      </div>
      <dl class="stats">
        <Stat name="step" value={model.lastStep.value === null ? '–' : formatStep(model.lastStep.value)} />
        <Stat name={run.state === 'running' ? 'elapsed' : 'took'} value={formatDuration(endOf(run, nowS.value) - run.created_s)} />
        {speed !== null && <Stat name="steps/s" value={speed >= 10 ? speed.toFixed(0) : speed.toPrecision(2)} />}
        <Stat name={run.attempts === 1 ? 'attempt' : 'attempts'} value={String(run.attempts)} />
        <Stat name={run.world_size === 1 ? 'rank' : 'ranks'} value={String(run.world_size)} />
        {run.dropped_reports > 0 && <Stat name="dropped reports" value={formatStep(run.dropped_reports)} />}
        {run.rejected_records > 0 && <Stat name="rejected records" value={formatStep(run.rejected_records)} />}
      </dl>
    </div>
  );
}

const Stat = ({ name, value }: { name: string; value: string }) => <div><dt>{name}</dt><dd>{value}</dd></div>;

function RunAlerts({ model }: { model: RunModel }) {
  const pick = (alert: Alert): void => {
    const around = Math.max(ZOOM_STEPS_AROUND_ALERT, alert.last_step - alert.first_step);
    model.sharedZoom.value = true;
    model.zoomTo(cleanRange(alert.first_step - around, alert.last_step + around, model.domain.value));
    const card = [...document.querySelectorAll<HTMLElement>('[data-metric]')].find((el) => el.dataset['metric'] === alert.metric);
    card?.scrollIntoView({ block: 'center', behavior: matchMedia('(prefers-reduced-motion: reduce)').matches ? 'auto' : 'smooth' });
  };
  return <><AlertBanner alerts={model.alerts.value} onPick={pick} /><AlertList alerts={model.alerts.value} now={nowS.value} onPick={pick} /></>;
}

function Charts({ model }: { model: RunModel }) {
  const filter = useSignal('');
  const sections = useComputed(() => sectionsOf(model.metrics.value, filter.value));
  const zoom = model.zoom.value;
  if (!model.metrics.value.length) return <Empty title="No points yet"><p class="muted">Charts appear here with the first <code>run.log(…)</code> or optimizer step.</p></Empty>;
  return (
    <>
      <div class="toolbar">
        <label class="search"><Icon name="search" /><span class="visually-hidden">Filter metrics</span>
          <input type="search" placeholder="Filter metrics" value={filter.value} onInput={(event) => { filter.value = event.currentTarget.value; }} /></label>
        <label class="switch"><input type="checkbox" role="switch" checked={model.sharedZoom.value} onChange={(event) => { model.sharedZoom.value = event.currentTarget.checked; }} />Zoom all charts together</label>
        {zoom
          ? <button type="button" class="chip" onClick={() => model.zoomTo(null)}>steps {formatStep(zoom[0])}–{formatStep(zoom[1])} <Icon name="close" /><span class="visually-hidden">Back to the whole run</span></button>
          : <span class="muted hint">drag to zoom, double click to go back</span>}
      </div>
      {sections.value.map((section) => <ChartSection key={section.name} model={model} section={section} />)}
      {!sections.value.length && <p class="muted">No metric matches “{filter.value}”.</p>}
    </>
  );
}

function ChartSection({ model, section }: { model: RunModel; section: Section }) {
  const open = useSignal(localStorage.getItem(`closed:${section.name}`) === null);
  const toggle = (): void => {
    open.value = !open.value;
    if (open.value) localStorage.removeItem(`closed:${section.name}`);
    else localStorage.setItem(`closed:${section.name}`, '1');
  };
  return (
    <section class="charts" aria-label={section.name}>
      <h2 class="section-title"><button type="button" aria-expanded={open.value} onClick={toggle}><Icon name="chevron" />{section.name} <small>{section.metrics.length}</small></button></h2>
      {open.value && <div class="grid">{section.metrics.map((metric) => <ChartCard key={metric} model={model} metric={metric} section={section.name} />)}</div>}
    </section>
  );
}
