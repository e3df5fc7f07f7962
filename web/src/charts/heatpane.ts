// What the heat map's card does: fetch, keep up with the run, draw, follow the pointer, zoom.
import { effect, signal, type Signal } from '@preact/signals';
import { getLayers, toNumber, type LayersAnswer } from '../api.ts';
import { formatStep, formatValue } from '../format.ts';
import { Latest } from '../latest.ts';
import { STATISTIC_LABELS, unitOfStatistic, type LayerView } from '../run/layers.ts';
import type { RunModel } from '../run/model.ts';
import { themeVersion, tokens } from '../theme.ts';
import { tip, type TipLine } from '../ui/tip.tsx';
import { cleanRange, pxOf, stepAt, type Margin, type Range } from './axis.ts';
import type { Figure } from './figure.ts';
import { colorRange, HeatGrid, heatFigure, scaleOf } from './heat.ts';
import { marksFor } from './marks.ts';
import { Plot } from './plot.ts';
import { attachPointer } from './pointer.ts';

const PX_PER_COLUMN = 2;
const REFRESH_MS = 1_000;

export class HeatPane {
  readonly colors = signal<Range | null>(null);
  private readonly model: RunModel;
  private readonly view: LayerView;
  private readonly state: Signal<string>;
  private grid: HeatGrid | null = null;
  private stale = true;
  private width = 600;
  private plot: Plot | null = null;

  constructor(model: RunModel, view: LayerView, state: Signal<string>) {
    this.model = model;
    this.view = view;
    this.state = state;
  }

  mount(card: HTMLElement, plotEl: HTMLElement): () => void {
    this.width = Math.max(200, plotEl.clientWidth);
    const refresh = new Latest(() => this.refresh(), REFRESH_MS);
    const reload = new Latest(async () => { this.stale = true; await this.refresh(); }, 0);
    const plot = (this.plot = new Plot(plotEl, {
      figure: (width, height) => this.figure(width, height),
      shown: () => refresh.call(),
      drawn: () => { card.dataset['lastStep'] = String(this.grid?.lastStep ?? ''); },
    }));
    const width = (): number => plotEl.clientWidth;
    const pointer = attachPointer(plotEl.parentElement!, () => this.margin(), {
      hover: (at) => this.hover(at, width(), plotEl.clientHeight),
      select: (from, to) => this.model.zoomTo(cleanRange(this.stepAt(from, width()), this.stepAt(to, width()), this.model.domain.peek())),
      reset: () => this.model.zoomTo(null),
      click: (px) => { this.view.step.value = this.layerStep(px, width()); },
    });
    const stops = [
      effect(() => { this.view.statistic.value; this.colors.value = null; }),
      effect(() => { this.view.statistic.value; this.model.zoom.value; this.stale = true; if (plot.isNear) reload.call(); }),
      effect(() => { this.model.layersStep.value; if (this.model.zoom.peek() === null && plot.isNear) refresh.call(); }),
      effect(() => { themeVersion.value; this.model.alerts.value; plot.redraw(); }),
      effect(() => { const step = this.model.cursor.value; pointer.cursor(step === null || !this.grid?.length ? null : pxOf(step, width(), this.margin(), this.range())); }),
    ];
    return () => {
      stops.forEach((stop) => stop());
      refresh.stop();
      reload.stop();
      pointer.remove();
      plot.remove();
    };
  }

  /** Fits the colours to what is shown now; until then they only widen, so that a colour keeps its meaning. */
  fitColors(): void {
    this.colors.value = this.grid ? colorRange(this.grid.raster(scaleOf(this.view.statistic.peek())).z) : null;
    this.plot?.redraw();
  }

  private margin(): Margin {
    return { l: this.width < 480 ? 96 : 168, r: 20, t: 6, b: 22 };
  }

  private range(): Range {
    return this.model.zoom.peek() ?? this.model.domain.peek();
  }

  private stepAt(px: number, width: number): number {
    return stepAt(px, width, this.margin(), this.range());
  }

  private layerStep(px: number, width: number): number | null {
    const step = Math.round(this.stepAt(px, width));
    const newest = this.view.newest.peek();
    return newest === null || step >= newest ? null : Math.max(0, step);
  }

  /** The whole when stale, else only the last column and what came after it. */
  private async refresh(): Promise<void> {
    const whole = this.stale || !this.grid?.length;
    const zoom = this.model.zoom.peek();
    const statistic = this.view.statistic.peek();
    try {
      const answer = await getLayers(this.model.id, statistic, whole ? zoom ?? [null, null] : [this.grid!.tailStep, null], this.columns());
      if (statistic !== this.view.statistic.peek() || zoom !== this.model.zoom.peek()) return;
      if (whole) this.replace(answer);
      else if (!this.extend(answer)) {
        this.stale = true;
        await this.refresh();
        return;
      }
      this.state.value = this.grid?.length ? 'ok' : 'empty';
      this.widenColors();
      if (whole) this.plot?.redraw();
      else this.plot?.redrawLive();
    } catch (error) {
      if (!this.grid?.length) this.state.value = `Could not load: ${(error as Error).message}`;
    }
  }

  private columns(): number {
    const { l, r } = this.margin();
    return Math.max(50, Math.floor((this.width - l - r) / PX_PER_COLUMN));
  }

  private replace(answer: LayersAnswer): void {
    this.grid = new HeatGrid(answer.layers, this.columns() * 2);
    this.grid.absorb(columnsOf(answer));
    this.stale = false;
  }

  /** False when the answer does not continue what we have: other layers, or wider columns. */
  private extend(answer: LayersAnswer): boolean {
    const grid = this.grid;
    if (!grid || answer.bucket_width > grid.width || answer.layers.length !== grid.layers.length) return false;
    grid.absorb(columnsOf(answer));
    return true;
  }

  private widenColors(): void {
    const now = this.grid ? colorRange(this.grid.raster(scaleOf(this.view.statistic.peek())).z) : null;
    const old = this.colors.peek();
    if (now) this.colors.value = old ? [Math.min(old[0], now[0]), Math.max(old[1], now[1])] : now;
  }

  private figure(width: number, height: number): Figure | null {
    const { grid, model } = this;
    if (!grid?.length) return null;
    this.width = width;
    const marks = marksFor(model.alerts.peek(), '', tokens());
    return heatFigure(grid, {
      palette: tokens(), range: this.range(), colors: this.colors.peek() ?? [0, 1], width, height, margin: this.margin(), marks, scale: scaleOf(this.view.statistic.peek()),
    });
  }

  private hover(at: { px: number; py: number; clientX: number; clientY: number } | null, width: number, height: number): void {
    const { grid } = this;
    if (!at || !grid?.length) {
      this.model.cursor.value = null;
      tip.value = null;
      return;
    }
    const { t, b } = this.margin();
    const row = Math.min(grid.layers.length - 1, Math.max(0, Math.floor(((at.py - t) / Math.max(1, height - t - b)) * grid.layers.length)));
    const step = this.stepAt(at.px, width);
    const cell = grid.cell(row, step);
    this.model.cursor.value = cell?.step ?? Math.round(step);
    const statistic = this.view.statistic.peek();
    const lines: TipLine[] = [{ text: grid.layers[row]!, strong: true }];
    if (cell) {
      lines.push({ text: grid.pitch > 1 ? `from step ${formatStep(cell.step)}` : `step ${formatStep(cell.step)}`, tone: 'muted' });
      lines.push({ text: `${STATISTIC_LABELS[statistic]} ${Number.isNaN(cell.value) ? (cell.bad ? 'no finite value' : 'absent') : formatValue(cell.value, unitOfStatistic(statistic))}` });
      if (cell.bad) lines.push({ text: `${formatStep(cell.bad)} non-finite`, tone: 'bad', strong: true });
    } else lines.push({ text: 'nothing reported here', tone: 'muted' });
    tip.value = { x: at.clientX, y: at.clientY, lines };
  }
}

function columnsOf(answer: LayersAnswer) {
  return { width: answer.bucket_width || 1, steps: answer.steps, values: answer.values.map((row) => row.map(toNumber)), nonfinite: answer.nonfinite, lastStep: answer.last_step };
}
