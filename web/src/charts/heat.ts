// Layers x steps as a grid of cells, how new columns join it, and its figure. Pure.
import type { Margin, Range } from './axis.ts';
import { layoutBase, markShapes, xAxis, type Figure, type Mark, type Palette } from './figure.ts';

export interface Columns { width: number; steps: number[]; values: number[][]; nonfinite: readonly (readonly [number, number, number])[]; lastStep: number | null }

interface Column { key: number; values: Float64Array; bad: Float64Array }

/** Scale of the colours: log10 of the magnitude, or the value itself. */
export type Scale = 'log' | 'linear';
export const scaleOf = (statistic: string): Scale => (/fraction|num_nonfinite/.test(statistic) ? 'linear' : 'log');

export const toScale = (value: number, scale: Scale): number => {
  if (scale === 'linear') return value;
  const size = Math.abs(value);
  return size > 0 ? Math.log10(size) : NaN;
};

/** Columns of equal step width, aligned to its multiples. A cell is the maximum over its finite values; NaN: absent. */
export class HeatGrid {
  readonly layers: string[];
  readonly capacity: number;
  width = 1;
  lastStep: number | null = null;
  private columns: Column[] = [];

  constructor(layers: string[], capacity: number) {
    this.layers = layers;
    this.capacity = Math.max(2, capacity);
  }

  get length(): number {
    return this.columns.length;
  }

  get firstStep(): number | null {
    const first = this.columns[0];
    return first ? first.key * this.width : null;
  }

  /** First step of the last column: ask from here for what is new, since that column may have grown. */
  get tailStep(): number | null {
    const last = this.columns.at(-1);
    return last ? last.key * this.width : null;
  }

  /** Adds columns, or replaces those from their first step on. */
  absorb(incoming: Columns): void {
    while (this.width < incoming.width) this.halve();
    const bad = badByColumn(incoming, this.layers.length);
    const first = incoming.steps[0];
    if (first !== undefined) {
      const from = Math.floor(first / this.width);
      this.columns = this.columns.filter((column) => column.key < from);
    }
    incoming.steps.forEach((step, c) => this.fold(step, incoming.values.map((row) => row[c] ?? NaN), bad[c]!));
    // By their span too: columns of a statistic that is read now and then are few, but far apart.
    while (this.columns.length > this.capacity || this.span > this.capacity) this.halve();
    if (incoming.lastStep !== null) this.lastStep = incoming.lastStep;
  }

  private get span(): number {
    return this.columns.length ? this.columns.at(-1)!.key - this.columns[0]!.key + 1 : 0;
  }

  private get gaps(): number[] {
    return this.columns.slice(1).map((column, i) => column.key - this.columns[i]!.key);
  }

  /** Steps that a column stands for, usually: statistics may be read every k steps only, and at once in a broken step. */
  get pitch(): number {
    const gaps = this.gaps.sort((a, b) => a - b);
    return (gaps[gaps.length >> 1] ?? 1) * this.width;
  }

  /** Rows of a full raster: a column lasts until the next one, at most for `pitch`; other holes stay null. `bad` counts non-finite elements. */
  raster(scale: Scale): { x0: number; dx: number; z: (number | null)[][]; bad: number[][] } {
    const unit = this.gaps.reduce(greatestCommonDivisor, 0) || 1;
    const lasting = Math.max(1, Math.round(this.pitch / this.width / unit));
    const begin = this.columns[0]?.key ?? 0;
    const places = this.columns.map((column) => (column.key - begin) / unit);
    const count = places.length ? places.at(-1)! + lasting : 0;
    const z = this.layers.map(() => new Array<number | null>(count).fill(null));
    const bad = this.layers.map(() => new Array<number>(count).fill(0));
    this.columns.forEach((column, i) => {
      const at = places[i]!;
      const end = Math.min(places[i + 1] ?? count, at + lasting);
      for (let row = 0; row < z.length; row++) {
        const v = toScale(column.values[row]!, scale);
        if (Number.isFinite(v)) z[row]!.fill(v, at, end);
        bad[row]![at] = column.bad[row]!;
      }
    });
    return { x0: this.firstStep ?? 0, dx: unit * this.width, z, bad };
  }

  cell(row: number, step: number): { value: number; bad: number; step: number } | null {
    const key = Math.floor(step / this.width);
    const reach = Math.max(1, this.pitch / this.width);
    const column = this.columns.findLast((c) => c.key <= key && key - c.key < reach);
    return column ? { value: column.values[row] ?? NaN, bad: column.bad[row] ?? 0, step: column.key * this.width } : null;
  }

  private fold(step: number, values: number[], bad: Float64Array): void {
    const key = Math.floor(step / this.width);
    const last = this.columns.at(-1);
    if (last?.key === key) mergeColumn(last, values, bad);
    else this.columns.push({ key, values: Float64Array.from(values), bad: bad.slice() });
  }

  private halve(): void {
    const old = this.columns;
    this.columns = [];
    this.width *= 2;
    for (const { key, values, bad } of old) {
      const half = key >> 1;
      const last = this.columns.at(-1);
      if (last?.key === half) mergeColumn(last, values, bad);
      else this.columns.push({ key: half, values, bad });
    }
  }
}

const greatestCommonDivisor = (a: number, b: number): number => (b === 0 ? a : greatestCommonDivisor(b, a % b));

function mergeColumn(into: Column, values: ArrayLike<number>, bad: ArrayLike<number>): void {
  for (let row = 0; row < into.values.length; row++) {
    const v = values[row]!;
    if (!Number.isNaN(v) && !(into.values[row]! >= v)) into.values[row] = v;
    into.bad[row]! += bad[row]!;
  }
}

function badByColumn(incoming: Columns, rows: number): Float64Array[] {
  const bad = incoming.steps.map(() => new Float64Array(rows));
  for (const [row, column, count] of incoming.nonfinite) if (bad[column]) bad[column][row] = count;
  return bad;
}

/** Grows marked cells to at least `tall` x `wide` cells, so that one bad cell of a pixel is seen. */
export function dilate(bad: readonly (readonly number[])[], tall: number, wide: number): (1 | null)[][] {
  const out = bad.map((row) => new Array<1 | null>(row.length).fill(null));
  bad.forEach((row, r) => row.forEach((count, c) => {
    if (!count) return;
    for (let y = Math.max(0, r - ((tall - 1) >> 1)); y < Math.min(bad.length, r + 1 + (tall >> 1)); y++) {
      for (let x = Math.max(0, c - ((wide - 1) >> 1)); x < Math.min(row.length, c + 1 + (wide >> 1)); x++) out[y]![x] = 1;
    }
  }));
  return out;
}

/** 1st to 99.9th percentile, so that one spike does not wash out the rest; null without finite cells. */
export function colorRange(z: readonly (readonly (number | null)[])[]): Range | null {
  const all: number[] = [];
  for (const row of z) for (const v of row) if (v !== null) all.push(v);
  if (!all.length) return null;
  all.sort((a, b) => a - b);
  const low = all[Math.floor((all.length - 1) * 0.01)]!;
  const high = all[Math.ceil((all.length - 1) * 0.999)]!;
  return high - low > 1e-9 ? [low, high] : [low - 0.5, high + 0.5];
}

/** "model.layers.3.mlp.down_proj.weight" in `chars` characters: whole, without ".weight", or its last part after an ellipsis. */
export function shortName(name: string, chars: number): string {
  const bare = name.length > chars ? name.replace(/\.weight$/, '') : name;
  return bare.length <= chars ? bare : `…${bare.slice(bare.length - chars + 1)}`;
}

/** Plotly reads a little HTML in labels; a layer's name is text. */
export const plainText = (text: string): string => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');

export interface HeatView { palette: Palette; range: Range; colors: Range; width: number; height: number; margin: Margin; marks: readonly Mark[]; scale: Scale }

export function heatFigure(grid: HeatGrid, view: HeatView): Figure {
  const { palette, range, width, height, margin } = view;
  const { x0, dx, z, bad } = grid.raster(view.scale);
  const plotHeight = height - margin.t - margin.b;
  const rows = grid.layers.length;
  const every = Math.max(1, Math.ceil(rows / Math.max(1, Math.floor(plotHeight / 17))));
  const labelled = grid.layers.map((_, i) => i).filter((i) => i % every === 0);
  const chars = Math.floor((margin.l - 14) / 5.9);
  // A column is drawn around its middle: it begins at its own first step.
  const place = { type: 'heatmap', x0: x0 + dx / 2, dx, y0: 0, dy: 1, showscale: false, hoverinfo: 'skip', zsmooth: false };
  const data: object[] = [{ ...place, name: 'magnitude', z, zmin: view.colors[0], zmax: view.colors[1], colorscale: VIRIDIS.map((color, i) => [i / (VIRIDIS.length - 1), color]) }];
  if (bad.some((row) => row.some((count) => count > 0))) {
    const tall = Math.ceil(4 / Math.max(0.1, plotHeight / Math.max(1, rows)));
    const wide = Math.ceil(4 / Math.max(0.1, ((width - margin.l - margin.r) * dx) / Math.max(1, range[1] - range[0])));
    data.push({ ...place, name: 'non-finite', z: dilate(bad, tall, wide), zmin: 0, zmax: 1, colorscale: [[0, palette.bad], [1, palette.bad]] });
  }
  return {
    data,
    layout: {
      ...layoutBase(palette, width, height, margin),
      xaxis: { ...xAxis(palette, range, width - margin.l - margin.r), showgrid: false },
      yaxis: {
        color: palette.muted, range: [rows - 0.5, -0.5], tickmode: 'array', tickvals: labelled, ticktext: labelled.map((i) => plainText(shortName(grid.layers[i]!, chars))),
        showgrid: false, zeroline: false, ticks: 'outside', ticklen: 5, tickcolor: 'rgba(0,0,0,0)', fixedrange: true, tickangle: 0,
      },
      // Above the cells, which would hide them.
      shapes: markShapes(view.marks, range, width).map((shape) => ({ ...shape, layer: 'above', opacity: 0.9 })),
    },
  };
}

export const VIRIDIS = ['#440154', '#482878', '#3e4989', '#31688e', '#26828e', '#1f9e89', '#35b779', '#6ece58', '#b5de2b', '#fde725'] as const;
