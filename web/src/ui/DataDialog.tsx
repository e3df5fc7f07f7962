// The buckets of a chart as a table, in a native dialog.
import { useEffect, useRef } from 'preact/hooks';
import type { Series } from '../charts/series.ts';
import { nonfiniteText } from '../charts/figure.ts';
import { formatStep, formatValue, unitOf } from '../format.ts';
import { Icon } from './icons.tsx';

const MOST_ROWS = 2_000;

export function DataDialog({ metric, series, onClose }: { metric: string; series: Series; onClose(): void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => { dialog.current?.showModal(); }, []);
  const { points, width } = series;
  const unit = unitOf(metric);
  const rows = points.step.map((_, i) => i).slice(-MOST_ROWS).reverse();
  return (
    <dialog ref={dialog} class="data" aria-label={`Data of ${metric}`} onClose={onClose}>
      <header><h2>{metric}</h2><span class="muted">{width === 1 ? 'one row per point' : `one row per ${formatStep(width)} steps`}</span>
        <button type="button" class="quiet" aria-label="Close" onClick={() => dialog.current?.close()}><Icon name="close" /></button></header>
      <div class="scroll" tabIndex={0} role="region" aria-label="Rows">
        <table>
          <thead><tr><th class="num">step</th><th class="num">points</th><th class="num">mean</th><th class="num">min</th><th class="num">max</th><th>non-finite</th></tr></thead>
          <tbody>{rows.map((i) => (
            <tr key={points.step[i]}>
              <td class="num">{formatStep(points.step[i]!)}</td><td class="num">{points.count[i]}</td>
              {[points.mean, points.min, points.max].map((list, k) => <td class="num" key={k}>{Number.isNaN(list[i]) ? '–' : formatValue(list[i], unit)}</td>)}
              <td class="bad">{nonfiniteText(points, i)}</td>
            </tr>))}
          </tbody>
        </table>
      </div>
    </dialog>
  );
}
