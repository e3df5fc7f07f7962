// One metric: its curve, its last value, and what can be done with it.
import { useSignal } from '@preact/signals';
import { useEffect, useMemo, useRef } from 'preact/hooks';
import type { RunModel } from '../run/model.ts';
import { DataDialog } from '../ui/DataDialog.tsx';
import { Menu } from '../ui/menu.tsx';
import { CardView } from './card.ts';
import { downloadCsv, downloadPng } from './export.ts';

interface Props { model: RunModel; metric: string; section: string }

const STATES = { loading: 'Loading…', empty: 'No points yet' } as const;

export function ChartCard({ model, metric, section }: Props) {
  const figureEl = useRef<HTMLElement>(null);
  const plotEl = useRef<HTMLDivElement>(null);
  const valueEl = useRef<HTMLOutputElement>(null);
  const log = useSignal(false);
  const table = useSignal(false);
  const state = useSignal<string>('loading');
  const view = useMemo(() => new CardView(model, metric, log, state), [model, metric]);
  useEffect(() => view.mount(figureEl.current!, plotEl.current!, valueEl.current!), [view]);

  const shown = view.series();
  return (
    <figure class="card chart" ref={figureEl} aria-label={metric} data-metric={metric}>
      <figcaption>
        <span class="name" title={metric}>{metric.startsWith(`${section}/`) ? metric.slice(section.length + 1) : metric}</span>
        <button type="button" class="toggle" aria-pressed={log.value} aria-label={`Log scale for ${metric}`} onClick={() => { log.value = !log.value; }}>log</button>
        <Menu label={`More for ${metric}`} items={[
          { label: 'Data table', run: () => { table.value = view.series() !== null; } },
          { label: 'Download CSV', run: () => { const series = view.series(); if (series) downloadCsv(metric, series); } },
          { label: 'Download PNG', run: () => void downloadPng(metric, (width, height) => view.figure(width, height)) },
          { label: 'Reset zoom', run: () => view.resetZoom() },
        ]} />
        <output ref={valueEl} aria-live="off" />
      </figcaption>
      <div class="plot-box"><div class="plot" ref={plotEl} /></div>
      {state.value === 'loading' || state.value === 'empty'
        ? <p class="state">{STATES[state.value]}</p>
        : state.value !== 'ok' && <p class="state bad" role="status">{state.value}<button type="button" onClick={() => view.retry()}>Retry</button></p>}
      {table.value && shown && <DataDialog metric={metric} series={shown} onClose={() => { table.value = false; }} />}
    </figure>
  );
}
