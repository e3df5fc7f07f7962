// What the gradient-flow card does: fetch the step that is asked for last, draw, name the layer under the pointer.
import { effect, signal, type Signal } from '@preact/signals';
import { getFlow, toValue, type FlowAnswer } from '../api.ts';
import { formatStep, formatValue } from '../format.ts';
import { Latest } from '../latest.ts';
import { STATISTIC_LABELS, unitOfStatistic, type LayerView } from '../run/layers.ts';
import type { RunModel } from '../run/model.ts';
import { curveColor, themeVersion, tokens } from '../theme.ts';
import { tip, type TipLine } from '../ui/tip.tsx';
import type { Margin, Range } from './axis.ts';
import type { Figure } from './figure.ts';
import { badLayers, flowFigure, flowRange } from './flow.ts';
import { scaleOf } from './heat.ts';
import { Plot } from './plot.ts';
import { attachPointer } from './pointer.ts';

const MARGIN: Margin = { l: 56, r: 20, t: 8, b: 6 };
const SLIDER_PAUSE_MS = 60;
const LIVE_PAUSE_MS = 500;

export class FlowPane {
  readonly step = signal<number | null>(null);
  /** Where the statistic is of an earlier step, because it is not read in every one. */
  readonly measuredAt = signal<number | null>(null);
  readonly numBad = signal(0);
  readonly noneFinite = signal(false);
  /** The run does not read this statistic at all. */
  readonly isUnread = signal(false);
  private readonly model: RunModel;
  private readonly view: LayerView;
  private readonly state: Signal<string>;
  private answer: FlowAnswer | null = null;
  private range: Range | null = null;
  private plot: Plot | null = null;

  constructor(model: RunModel, view: LayerView, state: Signal<string>) {
    this.model = model;
    this.view = view;
    this.state = state;
  }

  mount(card: HTMLElement, plotEl: HTMLElement): () => void {
    const sliding = new Latest(() => this.fetch(true), SLIDER_PAUSE_MS);
    const following = new Latest(() => this.fetch(false), LIVE_PAUSE_MS);
    const plot = (this.plot = new Plot(plotEl, {
      figure: (width, height) => this.figure(width, height),
      shown: () => sliding.call(),
      drawn: () => { card.dataset['lastStep'] = String(this.answer?.step ?? ''); },
    }));
    const pointer = attachPointer(plotEl.parentElement!, () => MARGIN, { hover: (at) => this.hover(at, plotEl.clientWidth) });
    const stops = [
      effect(() => { this.view.step.value; if (plot.isNear) sliding.call(); }),
      effect(() => { this.view.newest.value; if (plot.isNear && this.view.step.peek() === null) following.call(); }),
      effect(() => { this.view.statistic.value; this.range = null; this.count(); plot.redraw(); }),
      effect(() => { themeVersion.value; plot.redraw(); }),
    ];
    return () => {
      stops.forEach((stop) => stop());
      sliding.stop();
      following.stop();
      pointer.remove();
      plot.remove();
    };
  }

  private async fetch(asked: boolean): Promise<void> {
    try {
      this.answer = await getFlow(this.model.id, this.view.step.peek());
      this.step.value = this.answer.step;
      this.state.value = this.answer.layers.length ? 'ok' : 'empty';
      this.count();
      if (asked) this.plot?.redraw();
      else this.plot?.redrawLive();
    } catch (error) {
      if (!this.answer) this.state.value = `Could not load: ${(error as Error).message}`;
    }
  }

  private values(): (number | null)[] {
    return (this.answer?.statistics[this.view.statistic.peek()] ?? []).map(toValue).map((v) => (v !== null && this.isLog() ? Math.abs(v) : v));
  }

  private bad(): number[] {
    return badLayers(this.values(), (this.answer?.statistics['num_nonfinite'] ?? []).map(toValue));
  }

  private count(): void {
    const values = this.values();
    const measured = this.answer?.measured_at[this.view.statistic.peek()] ?? null;
    this.isUnread.value = this.answer !== null && this.answer.layers.length > 0 && measured === null;
    this.measuredAt.value = measured === this.answer?.step ? null : measured;
    this.numBad.value = this.bad().length;
    this.noneFinite.value = values.length > 0 && !values.some((v) => v !== null && Number.isFinite(v));
  }

  private isLog(): boolean {
    return scaleOf(this.view.statistic.peek()) === 'log';
  }

  private figure(width: number, height: number): Figure | null {
    if (!this.answer?.layers.length) return null;
    const values = this.values();
    this.range = flowRange(values.map((v) => v ?? NaN), this.isLog(), this.range);
    return flowFigure(values, this.bad(), {
      palette: tokens(), color: curveColor(0), log: this.isLog(), unit: unitOfStatistic(this.view.statistic.peek()), width, height, margin: MARGIN, range: this.range,
    });
  }

  private hover(at: { px: number; clientX: number; clientY: number } | null, width: number): void {
    const layers = this.answer?.layers ?? [];
    if (!at || !layers.length) {
      tip.value = null;
      return;
    }
    const share = (at.px - MARGIN.l) / Math.max(1, width - MARGIN.l - MARGIN.r);
    const i = Math.min(layers.length - 1, Math.max(0, Math.floor(share * layers.length)));
    const statistic = this.view.statistic.peek();
    const value = this.values()[i] ?? null;
    const numNonfinite = toValue(this.answer?.statistics['num_nonfinite']?.[i]) ?? 0;
    const lines: TipLine[] = [
      { text: layers[i]!, strong: true },
      { text: `layer ${i + 1} of ${layers.length}`, tone: 'muted' },
      { text: `${STATISTIC_LABELS[statistic]} ${value === null ? 'absent' : formatValue(value, unitOfStatistic(statistic))}` },
    ];
    if (numNonfinite > 0) lines.push({ text: `${formatStep(numNonfinite)} non-finite`, tone: 'bad', strong: true });
    tip.value = { x: at.clientX, y: at.clientY, lines };
  }
}
