// Gradient flow by depth at one step, with a slider over the steps.
import { useSignal } from '@preact/signals';
import { useEffect, useMemo, useRef } from 'preact/hooks';
import { formatStep } from '../format.ts';
import { STATISTIC_LABELS, type LayerView } from '../run/layers.ts';
import type { RunModel } from '../run/model.ts';
import { FlowPane } from './flowpane.ts';

interface Props { model: RunModel; view: LayerView }

export function FlowCard({ model, view }: Props) {
  const card = useRef<HTMLElement>(null);
  const plot = useRef<HTMLDivElement>(null);
  const state = useSignal('loading');
  const pane = useMemo(() => new FlowPane(model, view, state), [model, view]);
  useEffect(() => pane.mount(card.current!, plot.current!), [pane]);

  const newest = view.newest.value ?? 0;
  const first = model.firstStep.value ?? 0;
  const step = view.shownStep.value ?? 0;
  const bad = pane.numBad.value;
  return (
    <figure class="card flow" ref={card} aria-label="Gradient flow by depth">
      <figcaption>
        <span class="name">Gradient flow · {STATISTIC_LABELS[view.statistic.value]} by depth</span>
        {bad > 0 && <span class="badge bad">✕ {bad} non-finite</span>}
        <output aria-live="off">step {formatStep(pane.step.value ?? step)}{pane.measuredAt.value !== null && ` · read at ${formatStep(pane.measuredAt.value)}`}</output>
      </figcaption>
      <div class="plot-box"><div class="plot" ref={plot} /></div>
      <div class="depth" aria-hidden="true"><span>input</span><span>depth →</span><span>output</span></div>
      <div class="slider">
        <input type="range" aria-label="Step of the gradient flow" aria-valuetext={`step ${formatStep(step)}`} min={first} max={Math.max(newest, first + 1)} value={Math.max(step, first)} step={1}
          onInput={(event) => { const value = Number(event.currentTarget.value); view.step.value = value >= newest ? null : value; }} />
        <button type="button" class="toggle" aria-pressed={view.step.value === null} title="Follow the newest step" onClick={() => { view.step.value = view.step.value === null ? step : null; }}>latest</button>
      </div>
      {state.value === 'ok' && pane.isUnread.value && <p class="state">This statistic is not read in this run</p>}
      {state.value === 'ok' && !pane.isUnread.value && pane.noneFinite.value && <p class="state">No layer has a finite value at this step</p>}
      {state.value !== 'ok' && <p class={`state ${state.value === 'loading' || state.value === 'empty' ? '' : 'bad'}`}>{state.value === 'loading' ? 'Loading…' : state.value === 'empty' ? 'No layer statistics' : state.value}</p>}
    </figure>
  );
}
