// What a chart card does: fetch when near the screen, draw, follow the pointer, zoom.
import { effect, signal, type Signal } from '@preact/signals';
import type { RunModel } from '../run/model.ts';
import { formatStep, formatValue, unitOf, type Unit } from '../format.ts';
import { curveColor, themeVersion, tokens } from '../theme.ts';
import { tip, type TipLine } from '../ui/tip.tsx';
import { cleanRange, pxOf, stepAt, type Range } from './axis.ts';
import { figure, MARGIN, nonfiniteText, type Figure } from './figure.ts';
import { marksFor, nearestMark } from './marks.ts';
import { Plot } from './plot.ts';
import { attachPointer, type PointerOverlay } from './pointer.ts';
import type { Series } from './series.ts';

const BUCKETS_PER_PX = 2;

export class CardView {
  private readonly model: RunModel;
  private readonly metric: string;
  private readonly unit: Unit;
  private readonly log: Signal<boolean>;
  private readonly state: Signal<string>;
  private readonly ownZoom = signal<Range | null>(null);
  private plot: Plot | null = null;
  private pointer: PointerOverlay | null = null;
  private plotEl: HTMLElement | null = null;
  private fetchedZoom: Range | null = null;
  private seenZoomed: object | null = null;

  constructor(model: RunModel, metric: string, log: Signal<boolean>, state: Signal<string>) {
    this.model = model;
    this.metric = metric;
    this.unit = unitOf(metric);
    this.log = log;
    this.state = state;
  }

  mount(card: HTMLElement, plotEl: HTMLElement, valueEl: HTMLElement): () => void {
    this.plotEl = plotEl;
    valueEl.textContent = formatValue(this.model.last.get(this.metric), this.unit);
    const plot = (this.plot = new Plot(plotEl, {
      figure: (width, height) => this.figure(width, height),
      shown: () => this.fetch(),
      busy: () => this.pointer?.dragging ?? false,
      drawn: () => this.drawn(card, plotEl, valueEl),
    }));
    this.pointer = attachPointer(plotEl.parentElement!, () => MARGIN, {
      hover: (at) => this.hover(at, plotEl.clientWidth),
      select: (from, to) => this.select(from, to, plotEl.clientWidth),
      reset: () => this.resetZoom(),
    });
    const stops = [
      this.model.store.listen(this.metric, () => this.changed()),
      effect(() => { this.log.value; themeVersion.value; this.model.alerts.value; plot.redraw(); }),
      effect(() => { this.zoom(); this.fetch(); plot.redraw(); }),
      effect(() => { if (this.zoom() === null) { this.model.domain.value; plot.redrawLive(); } }),
      effect(() => this.follow(this.model.cursor.value, plotEl, valueEl)),
    ];
    return () => {
      stops.forEach((stop) => stop());
      this.pointer?.remove();
      plot.remove();
    };
  }

  /** The zoomed series if it is the one asked for, else the whole. */
  series(): Series | null {
    const { whole, zoomed } = this.model.store.curve(this.metric);
    const zoom = this.model.sharedZoom.peek() ? this.model.zoom.peek() : this.ownZoom.peek();
    return zoom && zoomed ? zoomed.series : whole;
  }

  figure(width: number, height: number): Figure | null {
    const series = this.series();
    if (!series?.length) return null;
    const { model, metric, unit } = this;
    const range = this.peekRange();
    return figure(series, {
      color: curveColor(0), palette: tokens(), unit, log: this.log.peek(), range, width, height, marks: marksFor(model.alerts.peek(), metric, tokens()),
    });
  }

  resetZoom(): void {
    if (this.model.sharedZoom.peek()) this.model.zoomTo(null);
    else this.ownZoom.value = null;
  }

  retry(): void {
    this.fetchedZoom = null;
    this.state.value = 'loading';
    this.fetch();
  }

  private zoom(): Range | null {
    return this.model.sharedZoom.value ? this.model.zoom.value : this.ownZoom.value;
  }

  private peekRange(): Range {
    return (this.model.sharedZoom.peek() ? this.model.zoom.peek() : this.ownZoom.peek()) ?? this.model.domain.peek();
  }

  private fetch(): void {
    if (!this.plot?.isNear) return;
    // Read here and not at mounting: with thousands of cards every read between their writes would lay out the page anew.
    const buckets = Math.max(200, this.plotEl!.clientWidth) * BUCKETS_PER_PX;
    void this.model.store.need(this.metric, buckets);
    const zoom = this.model.sharedZoom.peek() ? this.model.zoom.peek() : this.ownZoom.peek();
    if (zoom === this.fetchedZoom) return;
    this.fetchedZoom = zoom;
    void this.model.store.zoom(this.metric, zoom, buckets);
  }

  private changed(): void {
    const { whole, zoomed, error } = this.model.store.curve(this.metric);
    const next = error ? `Could not load: ${error}` : !whole ? 'loading' : whole.length ? 'ok' : 'empty';
    const isNews = this.state.peek() !== next || zoomed !== this.seenZoomed;
    this.state.value = next;
    this.seenZoomed = zoomed;
    if (isNews) this.plot?.redraw();
    else this.plot?.redrawLive();
  }

  private drawn(card: HTMLElement, plotEl: HTMLElement, valueEl: HTMLElement): void {
    const whole = this.model.store.curve(this.metric).whole;
    const value = whole?.lastValue ?? this.model.last.get(this.metric) ?? null;
    card.dataset['lastStep'] = String(whole?.lastStep ?? '');
    card.dataset['lastValue'] = String(value ?? '');
    card.dataset['draws'] = String(Number(card.dataset['draws'] ?? 0) + 1);
    this.follow(this.model.cursor.peek(), plotEl, valueEl);
  }

  private select(from: number, to: number, width: number): void {
    const range = this.peekRange();
    const next = cleanRange(stepAt(from, width, MARGIN, range), stepAt(to, width, MARGIN, range), this.model.domain.peek());
    if (this.model.sharedZoom.peek()) this.model.zoomTo(next);
    else this.ownZoom.value = next;
  }

  private hover(at: { px: number; clientX: number; clientY: number } | null, width: number): void {
    const series = this.series();
    if (!at || !series?.length) {
      this.model.cursor.value = null;
      tip.value = null;
      return;
    }
    const range = this.peekRange();
    const i = series.indexAt(stepAt(at.px, width, MARGIN, range));
    this.model.cursor.value = series.points.step[i]!;
    tip.value = { x: at.clientX, y: at.clientY, lines: this.describe(series, i, nearestMark(marksFor(this.model.alerts.peek(), this.metric, tokens()), at.px, width, MARGIN, range)) };
  }

  private describe(series: Series, i: number, alert: string | null): TipLine[] {
    const p = series.points;
    const first = p.step[i]!;
    const last = Math.floor(first / series.width) * series.width + series.width - 1;
    const text = (v: number): string => (Number.isNaN(v) ? '–' : formatValue(v, this.unit));
    const lines: TipLine[] = [{ text: p.count[i] === 1 ? `step ${formatStep(first)}` : `steps ${formatStep(first)}–${formatStep(last)}`, tone: 'muted' }];
    if (p.count[i] === 1 && !nonfiniteText(p, i)) lines.push({ text: text(p.mean[i]!), strong: true });
    else if (p.count[i] !== 1) lines.push({ text: `mean ${text(p.mean[i]!)}`, strong: true }, { text: `min ${text(p.min[i]!)}   max ${text(p.max[i]!)}` });
    if (nonfiniteText(p, i)) lines.push({ text: nonfiniteText(p, i), tone: 'bad', strong: true });
    if (alert) lines.push({ text: alert, tone: 'bad' });
    return lines;
  }

  /** Moves this card's share of the common cursor; the value in the title is then the one under it. */
  private follow(step: number | null, plotEl: HTMLElement, valueEl: HTMLElement): void {
    if (!this.plot?.isNear) return;
    const series = this.series();
    const range = this.peekRange();
    const inside = step !== null && step >= range[0] && step <= range[1] && series?.length;
    this.pointer?.cursor(inside ? pxOf(step, plotEl.clientWidth, MARGIN, range) : null);
    valueEl.classList.toggle('at-cursor', Boolean(inside));
    const i = inside ? series.indexAt(step) : -1;
    if (i >= 0) {
      const p = series!.points;
      valueEl.textContent = Number.isNaN(p.mean[i]) ? nonfiniteText(p, i) || '–' : formatValue(p.mean[i], this.unit);
    } else {
      const whole = this.model.store.curve(this.metric).whole;
      valueEl.textContent = formatValue(whole?.lastValue ?? this.model.last.get(this.metric), this.unit);
    }
  }
}
