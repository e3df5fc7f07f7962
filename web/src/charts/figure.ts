// Pure: curve + view -> Plotly data and layout. No DOM and no Plotly, so it is tested without a browser.
import type { Unit } from '../format.ts';
import { linearTicks, logTicks, stepTicks, valueRange, type Margin, type Range } from './axis.ts';
import type { Points, Series } from './series.ts';

export interface Palette { ink: string; muted: string; grid: string; bad: string; font: string }
export interface Mark { firstStep: number; lastStep: number; color: string; own: boolean; title: string }
export interface View {
  color: string;
  palette: Palette;
  unit: Unit;
  log: boolean;
  range: Range;
  width: number;
  height: number;
  marks: readonly Mark[];
}
export interface Figure { data: object[]; layout: object }

export const MARGIN: Margin = { l: 56, r: 20, t: 8, b: 22 };
const MOST_MARKS = 40;

export const rgba = (hex: string, alpha: number): string => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(',')},${alpha})`;

/** Upper edge left to right, then lower edge back: one closed outline for each stretch of buckets with finite values. */
export function outline({ step, min, max }: Points): { x: (number | null)[]; y: (number | null)[] } {
  const x: (number | null)[] = [];
  const y: (number | null)[] = [];
  for (let i = 0; i < step.length;) {
    let end = i;
    while (end < step.length && !Number.isNaN(max[end]!)) end++;
    if (end > i && x.length) { x.push(null); y.push(null); }
    for (let k = i; k < end; k++) { x.push(step[k]!); y.push(max[k]!); }
    for (let k = end - 1; k >= i; k--) { x.push(step[k]!); y.push(min[k]!); }
    i = Math.max(end, i) + 1;
  }
  return { x, y };
}

/** What to say of the non-finite points of a bucket: "2 NaN, 1 +Inf"; empty when there are none. */
export function nonfiniteText(p: Points, i: number): string {
  const parts = [[p.nan[i]!, 'NaN'], [p.pos_inf[i]!, '+Inf'], [p.neg_inf[i]!, '−Inf']] as const;
  return parts.filter(([count]) => count > 0).map(([count, name]) => `${count.toLocaleString('en-US')} ${name}`).join(', ');
}

function bandTrace(p: Points, color: string): object {
  return {
    name: 'band', ...outline(p), mode: 'lines', fill: 'toself', fillcolor: rgba(color, 0.2),
    line: { width: 1, color: rgba(color, 0.5), simplify: false }, hoverinfo: 'skip',
  };
}

function meanTrace(p: Points, color: string): object {
  const single = p.step.length < 3;
  return {
    name: 'mean', x: p.step, y: p.mean, mode: single ? 'lines+markers' : 'lines',
    line: { color, width: 1.5, simplify: false }, marker: { color, size: 4 }, hoverinfo: 'skip',
  };
}

/** Crosses on the lower edge of the plot, one for each bucket that holds a NaN or an infinity. */
function nonfiniteTrace(p: Points, color: string): object | null {
  const found = p.step.map((_, i) => i).filter((i) => nonfiniteText(p, i) !== '');
  if (!found.length) return null;
  return {
    name: 'non-finite', x: found.map((i) => p.step[i]!), y: found.map(() => 0), yaxis: 'y2', mode: 'markers', cliponaxis: false,
    marker: { symbol: 'x', size: 8, color, line: { width: 0 } }, customdata: found.map((i) => nonfiniteText(p, i)), hoverinfo: 'skip',
  };
}

/** One line for each alert; on the alert's own metric also the stretch that it lasted. Alerts on one pixel draw once. */
export function markShapes(marks: readonly Mark[], range: Range, width: number): object[] {
  const perPixel = (range[1] - range[0]) / Math.max(1, width);
  const drawn = new Set<string>();
  const shapes: object[] = [];
  for (const mark of marks) {
    const key = `${Math.round(mark.firstStep / Math.max(perPixel, 1e-9))} ${mark.color}`;
    if (mark.lastStep < range[0] || mark.firstStep > range[1] || drawn.has(key) || drawn.size >= MOST_MARKS) continue;
    drawn.add(key);
    const across = { xref: 'x', yref: 'paper', y0: 0, y1: 1 };
    if (mark.own && mark.lastStep > mark.firstStep) {
      shapes.push({ ...across, type: 'rect', x0: mark.firstStep, x1: mark.lastStep, fillcolor: rgba(mark.color, 0.1), line: { width: 0 }, layer: 'below' });
    }
    shapes.push({
      ...across, type: 'line', x0: mark.firstStep, x1: mark.firstStep, name: mark.title, opacity: mark.own ? 1 : 0.45, layer: 'below',
      // Dashed, so that a spike at the very step of its alert shows through.
      line: { color: mark.color, width: mark.own ? 1.5 : 1, dash: mark.own ? '5px,3px' : '2px,3px' },
    });
  }
  return shapes;
}

const axisBase = (palette: Palette): object => ({
  color: palette.muted, gridcolor: palette.grid, gridwidth: 1, zeroline: false, tickangle: 0, ticks: 'outside', ticklen: 5, tickcolor: 'rgba(0,0,0,0)', fixedrange: true, tickmode: 'array', showline: false,
});

export function layoutBase(palette: Palette, width: number, height: number, margin: Margin): object {
  return {
    width, height, margin: { ...margin, pad: 0 }, autosize: false, showlegend: false, hovermode: false, dragmode: false,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: { family: palette.font, size: 11, color: palette.muted },
  };
}

export function xAxis(palette: Palette, range: Range, plotWidth: number): object {
  const ticks = stepTicks(range, Math.max(2, Math.floor(plotWidth / 56)));
  return { ...axisBase(palette), range: [...range], tickvals: ticks.values, ticktext: ticks.labels };
}

export function yAxis(palette: Palette, range: Range, log: boolean, unit: Unit, plotHeight: number): object {
  const count = Math.max(2, Math.floor(plotHeight / 36));
  const ticks = log ? logTicks(range, count, unit) : linearTicks(range, count, unit);
  return { ...axisBase(palette), type: log ? 'log' : 'linear', range: [...range], tickvals: ticks.values, ticktext: ticks.labels };
}

export function figure(series: Series, view: View): Figure {
  const { points } = series;
  const { palette, range, width, height } = view;
  const inRange = points.step.map((_, i) => i).filter((i) => points.step[i]! + series.width > range[0] && points.step[i]! <= range[1]);
  const shown = inRange.length === points.step.length ? [points.min, points.max] : [inRange.map((i) => points.min[i]!), inRange.map((i) => points.max[i]!)];
  const log = view.log && valueRange(shown, true) !== null;
  const yRange = valueRange(shown, log) ?? [0, 1];
  const marks = nonfiniteTrace(points, palette.bad);
  return {
    data: [...(series.width > 1 ? [bandTrace(points, view.color)] : []), meanTrace(points, view.color), ...(marks ? [marks] : [])],
    layout: {
      ...layoutBase(palette, width, height, MARGIN),
      xaxis: xAxis(palette, range, width - MARGIN.l - MARGIN.r),
      yaxis: yAxis(palette, yRange, log, view.unit, height - MARGIN.t - MARGIN.b),
      ...(marks ? { yaxis2: { overlaying: 'y', range: [0, 1], visible: false, fixedrange: true } } : {}),
      shapes: markShapes(view.marks, range, width),
    },
  };
}
