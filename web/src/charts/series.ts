// A curve as buckets of equal step width, and how live points join it. Pure: no DOM, no Plotly.

/** Buckets as `POST /series/query` returns them, decoded: a bucket with no finite value holds NaN in mean, min and max. */
export interface Points {
  step: number[];
  count: number[];
  mean: number[];
  min: number[];
  max: number[];
  nan: number[];
  pos_inf: number[];
  neg_inf: number[];
}

export const emptyPoints = (): Points => ({ step: [], count: [], mean: [], min: [], max: [], nan: [], pos_inf: [], neg_inf: [] });

const COLUMNS = ['step', 'count', 'mean', 'min', 'max', 'nan', 'pos_inf', 'neg_inf'] as const;

/**
 * Buckets are aligned to multiples of `width` (a power of two), so edges never move while a run grows. `step[i]` is the
 * first step with a point in bucket i. `count` counts every point, non-finite ones included.
 */
export class Series {
  width: number;
  readonly points: Points;
  lastStep: number | null;
  /** Last value as logged, known once a point arrived live or a bucket holds a single one. */
  lastValue: number | null = null;
  readonly capacity: number;

  constructor(width: number, points: Points, lastStep: number | null, cap: number) {
    this.width = Math.max(1, width);
    this.points = points;
    this.lastStep = lastStep;
    this.capacity = Math.max(2, cap);
    const end = points.step.length - 1;
    if (end >= 0 && points.count[end] === 1) this.lastValue = onlyValue(points, end);
    this.shrink();
  }

  get length(): number {
    return this.points.step.length;
  }

  get numNonfinite(): number {
    const { nan, pos_inf, neg_inf } = this.points;
    let total = 0;
    for (let i = 0; i < nan.length; i++) total += nan[i]! + pos_inf[i]! + neg_inf[i]!;
    return total;
  }

  /** Adds one live point. A step already seen is ignored: the server repeats itself after a reconnect. */
  push(step: number, value: number): boolean {
    if (this.lastStep !== null && step <= this.lastStep) return false;
    const finite = Number.isFinite(value);
    const v = finite ? value : NaN;
    this.fold([step, 1, v, v, v, Number.isNaN(value) ? 1 : 0, value === Infinity ? 1 : 0, value === -Infinity ? 1 : 0]);
    this.lastStep = step;
    this.lastValue = value;
    this.shrink();
    return true;
  }

  /** Adds the buckets that a later query returned. Wider buckets than ours first halve ours. */
  absorb(width: number, points: Points, lastStep: number | null): void {
    while (this.width < width) this.halve();
    for (let i = 0; i < points.step.length; i++) {
      if (this.lastStep !== null && points.step[i]! <= this.lastStep) continue;
      this.fold(COLUMNS.map((name) => points[name][i]!));
      if (points.count[i] === 1) this.lastValue = onlyValue(points, i);
    }
    if (lastStep !== null) this.lastStep = Math.max(this.lastStep ?? lastStep, lastStep);
    this.shrink();
  }

  /** Index of the bucket that holds `step`, or of the nearest one; -1 when empty. */
  indexAt(step: number): number {
    const steps = this.points.step;
    let low = 0;
    let high = steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (steps[middle]! <= step) low = middle;
      else high = middle - 1;
    }
    const next = steps[low + 1];
    if (next !== undefined && step > steps[low]! + this.width - 1 && next - step < step - steps[low]!) return low + 1;
    return steps.length ? low : -1;
  }

  private fold(row: number[]): void {
    const p = this.points;
    const end = p.step.length - 1;
    if (end >= 0 && Math.floor(p.step[end]! / this.width) === Math.floor(row[0]! / this.width)) mergeInto(p, end, row);
    else COLUMNS.forEach((name, column) => p[name].push(row[column]!));
  }

  private shrink(): void {
    while (this.length > this.capacity) this.halve();
  }

  private halve(): void {
    const old = { ...this.points };
    COLUMNS.forEach((name) => { this.points[name] = []; });
    this.width *= 2;
    for (let i = 0; i < old.step.length; i++) this.fold(COLUMNS.map((name) => old[name][i]!));
  }
}

const finiteCount = (p: Points, i: number): number => p.count[i]! - p.nan[i]! - p.pos_inf[i]! - p.neg_inf[i]!;

function onlyValue(p: Points, i: number): number {
  if (p.nan[i]) return NaN;
  if (p.pos_inf[i]) return Infinity;
  return p.neg_inf[i] ? -Infinity : p.mean[i]!;
}

function mergeInto(p: Points, i: number, row: number[]): void {
  const [, count, mean, min, max, nan, posInf, negInf] = row as [number, number, number, number, number, number, number, number];
  const ours = finiteCount(p, i);
  const theirs = count - nan - posInf - negInf;
  if (theirs > 0) {
    p.mean[i] = ours > 0 ? p.mean[i]! + ((mean - p.mean[i]!) * theirs) / (ours + theirs) : mean;
    p.min[i] = ours > 0 ? Math.min(p.min[i]!, min) : min;
    p.max[i] = ours > 0 ? Math.max(p.max[i]!, max) : max;
  }
  p.count[i]! += count;
  p.nan[i]! += nan;
  p.pos_inf[i]! += posInf;
  p.neg_inf[i]! += negInf;
}
