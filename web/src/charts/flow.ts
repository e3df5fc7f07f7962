// Gradient flow: one statistic by depth at one step, as a stepped filled path. Pure.
import type { Unit } from '../format.ts';
import { valueRange, type Margin, type Range } from './axis.ts';
import { layoutBase, rgba, yAxis, type Figure, type Palette } from './figure.ts';

export interface FlowView { palette: Palette; color: string; log: boolean; unit: Unit; width: number; height: number; margin: Margin; range: Range | null }

/** Indexes of layers whose value is not a finite number, or that hold non-finite elements. */
export function badLayers(values: readonly (number | null)[], numNonfinite: readonly (number | null)[]): number[] {
  return values.map((_, i) => i).filter((i) => (numNonfinite[i] ?? 0) > 0 || (values[i] !== null && !Number.isFinite(values[i])));
}

/** Range of the values, kept wide enough for `previous`, so that the axis is still while the slider moves. */
export function flowRange(values: readonly number[], log: boolean, previous: Range | null): Range | null {
  const now = valueRange([values], log);
  if (!now || !previous) return now ?? previous;
  return [Math.min(now[0], previous[0]), Math.max(now[1], previous[1])];
}

/** Steps as closed outlines down to `floor`, one for each stretch of layers that have a value. */
export function staircase(values: readonly number[], floor: number): { x: (number | null)[]; y: (number | null)[] } {
  const x: (number | null)[] = [];
  const y: (number | null)[] = [];
  const put = (px: number | null, py: number | null): void => { x.push(px); y.push(py); };
  values.forEach((v, i) => {
    if (Number.isNaN(v)) return;
    if (!(i > 0 && !Number.isNaN(values[i - 1]!))) {
      if (x.length) put(null, null);
      put(i - 0.5, floor);
    }
    put(i - 0.5, v);
    put(i + 0.5, v);
    if (!(i + 1 < values.length && !Number.isNaN(values[i + 1]!))) put(i + 0.5, floor);
  });
  return { x, y };
}

/** `values` are null where a layer had no gradient: a gap, never a zero. */
export function flowFigure(values: readonly (number | null)[], bad: readonly number[], view: FlowView): Figure {
  const { palette, width, height, margin } = view;
  const shown = values.map((v) => (v === null || !Number.isFinite(v) || (view.log && v <= 0) ? NaN : v));
  const range = view.range ?? valueRange([shown], view.log) ?? [0, 1];
  const floor = view.log ? 10 ** range[0] : range[0];
  const data: object[] = [{
    name: 'flow', ...staircase(shown, floor), mode: 'lines', fill: 'toself', fillcolor: rgba(view.color, 0.28),
    line: { color: view.color, width: 1.2, simplify: false }, hoverinfo: 'skip',
  }];
  if (bad.length) {
    data.push({
      name: 'non-finite', x: [...bad], y: bad.map(() => 0), yaxis: 'y2', mode: 'markers', cliponaxis: false,
      marker: { symbol: 'x', size: 8, color: palette.bad }, hoverinfo: 'skip',
    });
  }
  return {
    data,
    layout: {
      ...layoutBase(palette, width, height, margin),
      xaxis: { color: palette.muted, range: [-0.5, Math.max(0.5, values.length - 0.5)], showgrid: false, zeroline: false, ticks: '', showticklabels: false, fixedrange: true },
      // With nothing to measure (every layer is NaN) a scale would be an invention.
      yaxis: { ...yAxis(palette, range, view.log, view.unit, height - margin.t - margin.b), ...(shown.every(Number.isNaN) ? { showticklabels: false, showgrid: false } : {}) },
      ...(bad.length ? { yaxis2: { overlaying: 'y', range: [0, 1], visible: false, fixedrange: true } } : {}),
    },
  };
}
