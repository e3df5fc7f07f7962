// Ranges, ticks and the mapping between steps and pixels. Pure, so that the pointer and the tests share Plotly's geometry.

import { formatTick, type Unit } from '../format.ts';

export type Range = readonly [number, number];
export interface Ticks { values: number[]; labels: string[] }
export interface Margin { l: number; r: number; t: number; b: number }

const NICE = [1, 2, 2.5, 5, 10] as const;

/** Smallest of 1, 2, 2.5, 5 times a power of ten that cuts `span` into at most `count` parts. */
export function niceStep(span: number, count: number): number {
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  return Number(((NICE.find((n) => n * power >= raw * (1 - 1e-9)) ?? 10) * power).toPrecision(12));
}

/** As `niceStep` for bytes: powers of two times a power of 1024, so that labels are whole. */
export const niceByteStep = (span: number, count: number): number => 2 ** Math.ceil(Math.log2(Math.max(1, span / Math.max(1, count))));

function multiples([low, high]: Range, step: number): number[] {
  const values: number[] = [];
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  for (let i = first; i <= last && values.length < 50; i++) values.push(Number((i * step).toPrecision(12)));
  return values;
}

/** Ticks of a linear axis over `range`, at most about `count`. */
export function linearTicks(range: Range, count: number, unit: Unit): Ticks {
  const span = range[1] - range[0];
  if (!(span > 0)) return { values: [], labels: [] };
  const step = unit === 'bytes' ? niceByteStep(span, count) : niceStep(span, count);
  const values = multiples(range, step);
  const labels = values.map((v) => formatTick(v, unit));
  // Neighbours that read the same say nothing: a narrow range far from zero needs its full digits.
  if (new Set(labels).size < labels.length) return { values, labels: values.map((v) => String(Number(v.toPrecision(9)))) };
  return { values, labels };
}

/** Ticks of a step axis: whole steps only. */
export function stepTicks(range: Range, count: number): Ticks {
  const step = Math.max(1, Math.ceil(niceStep(Math.max(1, range[1] - range[0]), count)));
  const values = multiples(range, step);
  return { values, labels: values.map((v) => formatTick(v, 'plain')) };
}

/** Ticks of a log axis; `range` is in log10 units, as Plotly has it, the values are not. */
export function logTicks(range: Range, count: number, unit: Unit): Ticks {
  const decades = Math.floor(range[1]) - Math.ceil(range[0]);
  if (decades < 1) return linearTicks([10 ** range[0], 10 ** range[1]], count, unit);
  const every = Math.max(1, Math.ceil(decades / count));
  const values: number[] = [];
  for (let e = Math.ceil(range[0]); e <= range[1]; e++) if (e % every === 0) values.push(10 ** e);
  return { values, labels: values.map((v) => formatTick(v, unit)) };
}

/** Range over finite numbers with 6 % of air; null when there are none. */
export function valueRange(lists: readonly (readonly number[])[], log: boolean): Range | null {
  let low = Infinity;
  let high = -Infinity;
  for (const list of lists) {
    for (const v of list) {
      if (!Number.isFinite(v) || (log && v <= 0)) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  if (low > high) return null;
  if (log) return pad(Math.log10(low), Math.log10(high), 0.15);
  if (low === 0 && high === 0) return [-0.04, 1];
  const [from, to] = pad(low, high, Math.abs(low) * 0.1);
  // No air below zero for what is never negative: an axis that says −0.5 bytes is odd.
  return low >= 0 && from < 0 ? [-(to - low) * 0.03, to] : [from, to];
}

function pad(low: number, high: number, whenFlat: number): Range {
  const span = high - low;
  const air = span > Math.abs(high) * 1e-12 ? span * 0.06 : whenFlat;
  return [low - air, high + air];
}

/** Step under a pixel of the plot's box (not clamped). */
export function stepAt(px: number, width: number, margin: Margin, range: Range): number {
  return range[0] + ((px - margin.l) / Math.max(1, width - margin.l - margin.r)) * (range[1] - range[0]);
}

/** Pixel of a step in the plot's box. */
export function pxOf(step: number, width: number, margin: Margin, range: Range): number {
  return margin.l + ((step - range[0]) / (range[1] - range[0] || 1)) * (width - margin.l - margin.r);
}

/** Whole, ordered, inside `domain`, at least two steps wide. */
export function cleanRange(a: number, b: number, domain: Range): Range {
  const low = Math.max(domain[0], Math.floor(Math.min(a, b)));
  const high = Math.min(domain[1], Math.ceil(Math.max(a, b)));
  return high - low >= 2 ? [low, high] : [Math.max(domain[0], low - 1), Math.max(domain[0], low - 1) + 2];
}
