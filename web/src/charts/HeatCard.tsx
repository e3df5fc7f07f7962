// Layers x steps: where in the network, and when, gradients are large, small, or not numbers.
import { useSignal } from '@preact/signals';
import { useEffect, useMemo, useRef } from 'preact/hooks';
import { formatTick } from '../format.ts';
import { STATISTICS, STATISTIC_LABELS, unitOfStatistic, type LayerView } from '../run/layers.ts';
import type { RunModel } from '../run/model.ts';
import { scaleOf, VIRIDIS } from './heat.ts';
import { HeatPane } from './heatpane.ts';

interface Props { model: RunModel; view: LayerView }

export function HeatCard({ model, view }: Props) {
  const card = useRef<HTMLElement>(null);
  const plot = useRef<HTMLDivElement>(null);
  const state = useSignal('loading');
  const pane = useMemo(() => new HeatPane(model, view, state), [model, view]);
  useEffect(() => pane.mount(card.current!, plot.current!), [pane]);

  const colors = pane.colors.value;
  const statistic = view.statistic.value;
  const label = (v: number): string => formatTick(scaleOf(statistic) === 'log' ? 10 ** v : v, unitOfStatistic(statistic));
  return (
    <figure class="card heat" ref={card} aria-label="Gradients, layers by steps">
      <figcaption>
        <span class="name">Gradients · layers × steps</span>
        {colors && (
          <span class="scale" title="Colour scale; click to fit it to what is shown">
            <button type="button" aria-label={`Colours from ${label(colors[0])} to ${label(colors[1])}. Fit colours`} onClick={() => pane.fitColors()}>
              {label(colors[0])}<i style={{ background: `linear-gradient(90deg, ${VIRIDIS.join(',')})` }} />{label(colors[1])}
            </button>
            <span class="key"><i class="bad-cell" /> NaN / Inf</span>
          </span>
        )}
        <label class="pick"><span class="visually-hidden">Statistic</span>
          <select value={statistic} onChange={(event) => { view.statistic.value = event.currentTarget.value; }}>
            {STATISTICS.map((name) => <option key={name} value={name}>{STATISTIC_LABELS[name]}</option>)}
          </select>
        </label>
      </figcaption>
      <div class="plot-box"><div class="plot" ref={plot} /></div>
      {state.value !== 'ok' && <p class={`state ${state.value === 'loading' || state.value === 'empty' ? '' : 'bad'}`}>{state.value === 'loading' ? 'Loading…' : state.value === 'empty' ? 'No layer statistics' : state.value}</p>}
    </figure>
  );
}
