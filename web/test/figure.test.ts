import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import { figure, markShapes, outline, type View } from '../src/charts/figure.ts';
import { emptyPoints, Series, type Points } from '../src/charts/series.ts';

const palette = { ink: '#000000', muted: '#555555', grid: '#eeeeee', bad: '#ff0000', font: 'x' };
const view: View = { color: '#2d66f3', palette, unit: 'plain', log: false, range: [0, 8], width: 400, height: 200, marks: [] };
const points: Points = { step: [0, 4], count: [4, 4], mean: [1, 2], min: [0.5, 1], max: [3, 4], nan: [0, 1], pos_inf: [0, 2], neg_inf: [0, 0] };
interface Trace { name: string; x: number[]; y: number[]; customdata?: string[]; fill?: string }
const traces = (series: Series, change: Partial<View> = {}): Trace[] => figure(series, { ...view, ...change }).data as Trace[];
const layout = (series: Series, change: Partial<View> = {}) => figure(series, { ...view, ...change }).layout as { yaxis: { type: string; range: number[]; ticktext: string[] }; xaxis: { range: number[] }; shapes: object[] };

describe('figure', () => {
  it('draws the band as one closed outline and the mean over it', () => {
    const [band, mean] = traces(new Series(4, points, 7, 64));
    assert.deepEqual(band!.y, [3, 4, 1, 0.5]);
    assert.equal(band!.fill, 'toself');
    assert.deepEqual(mean!.y, [1, 2]);
  });

  it('needs no band where each bucket is one point', () => {
    assert.deepEqual(traces(new Series(1, points, 4, 64)).map((trace) => trace.name), ['mean', 'non-finite']);
  });

  it('marks each bucket with non-finite points at its step, with their counts', () => {
    const mark = traces(new Series(4, points, 7, 64)).at(-1)!;
    assert.deepEqual(mark.x, [4]);
    assert.deepEqual(mark.customdata, ['1 NaN, 2 +Inf']);
  });

  it('holds the spike inside the y range, also when only a part is shown', () => {
    const series = new Series(4, points, 7, 64);
    assert.ok(layout(series).yaxis.range[1]! > 4);
    assert.ok(layout(series, { range: [0, 3] }).yaxis.range[1]! < 4);
  });

  it('falls back to a linear axis when nothing is positive', () => {
    const series = new Series(1, { ...points, mean: [0, -1], min: [0, -1], max: [0, -1] }, 4, 64);
    assert.equal(layout(series, { log: true }).yaxis.type, 'linear');
    assert.equal(layout(new Series(4, points, 7, 64), { log: true }).yaxis.type, 'log');
  });

  it('survives a series of nothing but NaN', () => {
    const series = new Series(4, { ...points, mean: [NaN, NaN], min: [NaN, NaN], max: [NaN, NaN], nan: [4, 4] }, 7, 64);
    assert.deepEqual(traces(series)[0]!.x, []);
    assert.deepEqual(layout(series).yaxis.range, [0, 1]);
  });
});

describe('outline', () => {
  it('closes each stretch of finite buckets by itself', () => {
    const p = { ...emptyPoints(), step: [0, 1, 2, 3], min: [1, 1, NaN, 1], max: [2, 2, NaN, 2] };
    assert.deepEqual(outline(p).x, [0, 1, 1, 0, null, 3, 3]);
  });
});

describe('alert marks', () => {
  const mark = { firstStep: 3, lastStep: 5, color: '#ff0000', own: true, title: 'critical: NaN' };
  it('draws a line at the first step, and the stretch on the own metric only', () => {
    assert.deepEqual(markShapes([mark], [0, 8], 400).map((shape) => (shape as { type: string; x0: number }).type), ['rect', 'line']);
    assert.equal(markShapes([{ ...mark, own: false }], [0, 8], 400).length, 1);
  });
  it('draws alerts on one pixel once and leaves out what is not in range', () => {
    const many = Array.from({ length: 500 }, (_, i) => ({ ...mark, firstStep: i, lastStep: i }));
    assert.ok(markShapes(many, [0, 200_000], 400).length <= 2);
    assert.equal(markShapes([mark], [100, 200], 400).length, 0);
    assert.ok(markShapes(many, [0, 500], 400).length <= 40);
  });
});
