// The quiet end of a run's page: what is not collected and why, the configuration, where it ran.
import type { RunModel } from '../run/model.ts';

const text = (value: unknown): string => (typeof value === 'string' ? value : JSON.stringify(value) ?? '');

/** {"a": {"b": 1}} -> [["a.b", 1]]: nested configuration as one list. */
function flatten(value: Record<string, unknown>, prefix = ''): [string, unknown][] {
  return Object.entries(value).flatMap(([key, inner]): [string, unknown][] => {
    const isObject = typeof inner === 'object' && inner !== null && !Array.isArray(inner);
    return isObject && Object.keys(inner).length ? flatten(inner as Record<string, unknown>, `${prefix}${key}.`) : [[prefix + key, inner]];
  });
}

export function RunNotes({ model }: { model: RunModel }) {
  const run = model.run.value!;
  const unavailable = Object.entries(run.unavailable ?? {});
  const config = flatten(run.config ?? {});
  return (
    <div class="notes">
      {(run.dumps ?? []).map((dump) => (
        <p class="dump" key={`${dump.attempt}.${dump.step}`}>
          Flight recorder: saved step {dump.step} at <code>{dump.path}</code> ({dump.host}): {dump.reason}{run.world_size > 1 ? ` on rank ${dump.rank}` : ''}.
        </p>
      ))}
      {unavailable.length > 0 && <Pairs title="Not collected" hint="never shown as zero" pairs={unavailable} />}
      {config.length > 0 && <Pairs title="Configuration" pairs={config} />}
      {(run.sources ?? []).length > 0 && (
        <details><summary>Ranks <small>{run.sources.length}</small></summary>
          <div class="sources">{run.sources.map((source, i) => <dl class="pairs" key={i}>{flatten(source).map(([key, value]) => <div key={key}><dt>{key}</dt><dd>{text(value)}</dd></div>)}</dl>)}</div>
        </details>
      )}
      {run.notes && <p>{run.notes}</p>}
      <p class="muted">run <code>{run.id}</code> in project <code>{run.project}</code></p>
    </div>
  );
}

function Pairs({ title, hint, pairs }: { title: string; hint?: string; pairs: [string, unknown][] }) {
  return (
    <details>
      <summary>{title} <small>{pairs.length}{hint ? ` · ${hint}` : ''}</small></summary>
      <dl class="pairs">{pairs.map(([key, value]) => <div key={key}><dt>{key}</dt><dd>{text(value)}</dd></div>)}</dl>
    </details>
  );
}
