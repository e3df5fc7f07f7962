// The curves of one run: fetched in batches, kept up to date by live points, without a hole between the two.
import type { SeriesAnswer } from '../api.ts';
import { Series } from '../charts/series.ts';
import type { Range } from '../charts/axis.ts';

export type Query = (metrics: string[], range: readonly [number | null, number | null], buckets: number) => Promise<SeriesAnswer[]>;
export type Listener = () => void;

interface Curve {
  whole: Series | null;
  zoomed: { range: Range; series: Series } | null;
  /** The range asked for last: an answer for an older one is thrown away. */
  wanted: Range | null;
  error: string | null;
  /** Live points that arrived while a query was under way; those it did not cover are added when it ends. */
  early: [number, number][] | null;
  /** The first point after a (re)subscription tells whether one was missed before it. */
  checkNext: boolean;
  listeners: Set<Listener>;
}

interface Ask { metric: string; from: number | null; to: number | null; buckets: number; done: (answer: SeriesAnswer) => void; failed: (error: Error) => void }

const MOST_PER_QUERY = 32;
const MOST_EARLY_POINTS = 20_000;

/** Subscribe first, query then, and add points with a step above the last one known: that order loses nothing. */
export class SeriesStore {
  private readonly curves = new Map<string, Curve>();
  private readonly query: Query;
  private readonly later: (run: () => void) => void;
  private asks: Ask[] = [];

  constructor(query: Query, later: (run: () => void) => void = (run) => queueMicrotask(run)) {
    this.query = query;
    this.later = later;
  }

  curve(metric: string): Readonly<Curve> {
    return this.own(metric);
  }

  listen(metric: string, listener: Listener): () => void {
    const { listeners } = this.own(metric);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }

  /** Makes sure the whole curve is there; a second call does nothing. */
  async need(metric: string, buckets: number): Promise<void> {
    const curve = this.own(metric);
    if (curve.whole || curve.early) return;
    await this.load(metric, curve, buckets);
  }

  /** Fetches `range` at its own resolution. The whole curve stays and keeps growing. */
  async zoom(metric: string, range: Range | null, buckets: number): Promise<void> {
    const curve = this.own(metric);
    curve.wanted = range;
    if (range === null) {
      curve.zoomed = null;
      this.tell(curve);
      return;
    }
    try {
      const answer = await this.ask(metric, range[0], range[1], buckets);
      if (curve.wanted !== range) return;
      curve.zoomed = { range, series: new Series(answer.bucket_width, answer.points, answer.last_step, buckets * 2) };
      curve.error = null;
    } catch (error) {
      curve.error = (error as Error).message;
    }
    this.tell(curve);
  }

  push(metric: string, steps: readonly number[], values: readonly number[]): void {
    const curve = this.curves.get(metric);
    if (!curve) return;
    if (curve.early) {
      steps.forEach((step, i) => curve.early!.push([step, values[i]!]));
      if (curve.early.length > MOST_EARLY_POINTS) curve.early.splice(0, curve.early.length - MOST_EARLY_POINTS);
    } else if (curve.whole) {
      this.append(metric, curve, curve.whole, steps, values);
    }
  }

  /** After a reconnect: asks every loaded curve for what came after its last step. */
  catchUp(): void {
    for (const [metric, curve] of this.curves) if (curve.whole && !curve.early) void this.loadTail(metric, curve, curve.whole, true);
  }

  /** After a resync, or when an attempt rewrote steps: everything again. */
  reload(): void {
    for (const [metric, curve] of this.curves) {
      if (!curve.whole && !curve.error) continue;
      const buckets = curve.whole ? curve.whole.capacity : 800;
      void this.load(metric, curve, buckets);
    }
  }

  private own(metric: string): Curve {
    let curve = this.curves.get(metric);
    if (!curve) this.curves.set(metric, (curve = { whole: null, zoomed: null, wanted: null, error: null, early: null, checkNext: true, listeners: new Set() }));
    return curve;
  }

  private tell(curve: Curve): void {
    curve.listeners.forEach((listener) => listener());
  }

  private append(metric: string, curve: Curve, whole: Series, steps: readonly number[], values: readonly number[]): void {
    const first = steps[0];
    if (curve.checkNext && first !== undefined && whole.lastStep !== null && first > whole.lastStep + 1) {
      curve.early = [];
      steps.forEach((step, i) => curve.early!.push([step, values[i]!]));
      void this.loadTail(metric, curve, whole, false);
      return;
    }
    curve.checkNext = false;
    let grew = false;
    steps.forEach((step, i) => {
      grew = whole.push(step, values[i]!) || grew;
      if (curve.zoomed && step <= curve.zoomed.range[1]) curve.zoomed.series.push(step, values[i]!);
    });
    if (grew) this.tell(curve);
  }

  private async load(metric: string, curve: Curve, buckets: number): Promise<void> {
    curve.early ??= [];
    curve.error = null;
    try {
      const answer = await this.ask(metric, null, null, buckets);
      curve.whole = new Series(answer.bucket_width, answer.points, answer.last_step, buckets);
    } catch (error) {
      curve.error = (error as Error).message;
    }
    this.settle(metric, curve, true);
  }

  private async loadTail(metric: string, curve: Curve, whole: Series, checkNext: boolean): Promise<void> {
    curve.early ??= [];
    try {
      const answer = await this.ask(metric, whole.lastStep === null ? null : whole.lastStep + 1, null, whole.capacity);
      whole.absorb(answer.bucket_width, answer.points, answer.points.step.length ? answer.last_step : null);
    } catch (error) {
      curve.error = (error as Error).message;
    }
    this.settle(metric, curve, checkNext);
  }

  private settle(metric: string, curve: Curve, checkNext: boolean): void {
    const { whole } = curve;
    const early = (curve.early ?? []).filter(([step]) => whole?.lastStep === null || step > (whole?.lastStep ?? -1));
    curve.early = null;
    curve.checkNext = checkNext;
    if (whole && early.length) this.append(metric, curve, whole, early.map(([step]) => step), early.map(([, value]) => value));
    this.tell(curve);
  }

  private ask(metric: string, from: number | null, to: number | null, buckets: number): Promise<SeriesAnswer> {
    return new Promise((done, failed) => {
      if (!this.asks.length) this.later(() => this.flush());
      this.asks.push({ metric, from, to, buckets, done, failed });
    });
  }

  /** One query per range and width, not one per card. */
  private flush(): void {
    const groups = new Map<string, Ask[]>();
    for (const ask of this.asks) {
      const key = `${ask.from} ${ask.to} ${ask.buckets}`;
      const group = groups.get(key);
      if (group) group.push(ask);
      else groups.set(key, [ask]);
    }
    this.asks = [];
    for (const group of groups.values()) {
      for (let i = 0; i < group.length; i += MOST_PER_QUERY) void this.send(group.slice(i, i + MOST_PER_QUERY));
    }
  }

  private async send(group: Ask[]): Promise<void> {
    const { from, to, buckets } = group[0]!;
    try {
      const answers = await this.query(group.map((ask) => ask.metric), [from, to], buckets);
      const byMetric = new Map(answers.map((answer) => [answer.metric, answer]));
      for (const ask of group) {
        const answer = byMetric.get(ask.metric);
        if (!answer || answer.error) ask.failed(new Error(answer?.error ?? 'the server did not answer for this metric'));
        else ask.done(answer);
      }
    } catch (error) {
      for (const ask of group) ask.failed(error as Error);
    }
  }
}
