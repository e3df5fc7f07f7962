import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import type { Metric } from '../src/api.ts';
import { badLayers, flowFigure, staircase } from '../src/charts/flow.ts';
import { colorRange, dilate, HeatGrid, plainText, scaleOf, shortName, toScale } from '../src/charts/heat.ts';
import { sectionsOf } from '../src/run/sections.ts';
import { windowOf } from '../src/ui/window.ts';

const column = (step: number, values: number[]) => ({ width: 1, steps: [step], values: values.map((v) => [v]), nonfinite: [], lastStep: step });

describe('HeatGrid', () => {
  it('keeps the maximum and every non-finite count through halvings', () => {
    const grid = new HeatGrid(['a', 'b'], 8);
    const steps = Array.from({ length: 100 }, (_, i) => i);
    grid.absorb({ width: 1, steps, values: [steps.map((step) => (step === 33 ? 9 : 1)), steps.map(() => NaN)], nonfinite: [[1, 50, 7]], lastStep: 99 });
    assert.ok(grid.length <= 8);
    const { z, bad } = grid.raster('linear');
    assert.equal(Math.max(...z[0]!.map(Number)), 9);
    assert.ok(z[1]!.every((v) => v === null));
    assert.equal(bad[1]!.reduce((a, b) => a + b), 7);
  });

  it('replaces the last column when it is fetched again, grown', () => {
    const grid = new HeatGrid(['a'], 8);
    grid.absorb({ width: 4, steps: [0, 4], values: [[1, 2]], nonfinite: [], lastStep: 5 });
    assert.equal(grid.tailStep, 4);
    grid.absorb({ width: 1, steps: [4, 5, 6, 8], values: [[1, 2, 5, 3]], nonfinite: [], lastStep: 8 });
    assert.deepEqual(grid.raster('linear').z, [[1, 5, 3]]);
    assert.equal(grid.lastStep, 8);
  });

  it('draws statistics that are read every k steps without holes', () => {
    const grid = new HeatGrid(['a'], 64);
    for (const step of [10, 20, 30]) grid.absorb(column(step, [step]));
    assert.equal(grid.pitch, 10);
    assert.deepEqual(grid.raster('linear').z, [[10, 20, 30]]);
    assert.equal(grid.cell(0, 27)!.value, 20);
    assert.equal(grid.cell(0, 99), null);
  });

  it('draws them so too when a broken step was read between', () => {
    const grid = new HeatGrid(['a'], 64);
    for (const step of [1, 6, 11, 13, 16, 21]) grid.absorb(column(step, [step]));
    assert.equal(grid.pitch, 5);
    const { x0, dx, z, bad } = grid.raster('linear');
    assert.deepEqual([x0, dx], [1, 1]);
    assert.deepEqual(z[0]!.map((v) => v ?? 0), [1, 1, 1, 1, 1, 6, 6, 6, 6, 6, 11, 11, 13, 13, 13, 16, 16, 16, 16, 16, 21, 21, 21, 21, 21]);
    assert.equal(bad[0]!.length, z[0]!.length);
    assert.deepEqual([10, 12, 15].map((step) => grid.cell(0, step)!.value), [6, 11, 13]);
  });

  it('leaves a hole where nothing came for longer than usual', () => {
    const grid = new HeatGrid(['a'], 64);
    for (const step of [0, 1, 2, 3, 8]) grid.absorb(column(step, [step]));
    assert.deepEqual(grid.raster('linear').z, [[0, 1, 2, 3, null, null, null, null, 8]]);
  });

  it('keeps a bounded raster of columns that are far apart', () => {
    const grid = new HeatGrid(['a'], 64);
    for (let step = 1; step < 20_000; step += 50) grid.absorb(column(step, [step]));
    assert.ok(grid.raster('linear').z[0]!.length <= 64 + grid.pitch / grid.width);
    assert.ok(grid.raster('linear').z[0]!.every((v) => v !== null));
  });
});

describe('heat colours', () => {
  it('are of log10 of the magnitude; a zero is absent, not minus infinity', () => {
    assert.deepEqual([toScale(100, 'log'), toScale(-100, 'log'), toScale(0, 'log')], [2, 2, NaN]);
    assert.equal(scaleOf('zero_fraction'), 'linear');
  });
  it('do not let one spike wash out the rest', () => {
    const z = [[...Array.from({ length: 5000 }, () => 0), 50, ...Array.from({ length: 5000 }, () => 1)]];
    assert.deepEqual(colorRange(z), [0, 1]);
    assert.equal(colorRange([[null]]), null);
  });
  it('show one bad cell large enough to be seen', () => {
    const grown = dilate([[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], 3, 2);
    assert.equal(grown.flat().filter(Boolean).length, 6);
    assert.equal(grown[1]![2], 1);
  });
});

describe('layer names', () => {
  it('keep their end when they are cut, and stay text', () => {
    assert.equal(shortName('blocks.0.fc.weight', 20), 'blocks.0.fc.weight');
    assert.equal(shortName('model.layers.31.mlp.down_proj.weight', 12), '…p.down_proj');
    assert.equal(plainText('<b>&'), '&lt;b&gt;&amp;');
  });
});

describe('gradient flow', () => {
  it('leaves a gap where a layer has no value', () => {
    assert.deepEqual(staircase([2, NaN, 3], 0).x, [-0.5, -0.5, 0.5, 0.5, null, 1.5, 1.5, 2.5, 2.5]);
  });
  it('marks layers that are not finite, absent ones are not', () => {
    assert.deepEqual(badLayers([1, null, NaN, 4, Infinity], [0, null, 0, 3, 0]), [2, 3, 4]);
  });
  it('draws something where nothing is finite', () => {
    const palette = { ink: '', muted: '', grid: '', bad: '#ff0000', font: '' };
    const figure = flowFigure([NaN, NaN], [0, 1], { palette, color: '#2d66f3', log: true, unit: 'plain', width: 300, height: 200, margin: { l: 1, r: 1, t: 1, b: 1 }, range: null });
    assert.equal(figure.data.length, 2);
  });
});

describe('sections', () => {
  const metrics = (...names: string[]): Metric[] => names.map((name) => ({ name, section: '', kind: 'scalar', num_points: 1, first_step: 1, last_step: 1, last: 1, num_nonfinite: 0 }));
  it('come in the fixed order, known ones first, lone strangers together', () => {
    const found = sectionsOf(metrics('zeta/a', 'zeta/b', 'eval/loss', 'time/step_s', 'grad/norm', 'train/lr', 'train/loss', 'plain'));
    assert.deepEqual(found.map((section) => [section.name, section.metrics.join(' ')]), [
      ['train', 'train/loss train/lr'], ['grad', 'grad/norm'], ['time', 'time/step_s'], ['zeta', 'zeta/a zeta/b'], ['other', 'eval/loss plain'],
    ]);
  });
  it('are filtered by any part of a name', () => {
    assert.deepEqual(sectionsOf(metrics('train/loss', 'grad/norm'), ' NORM ').map((section) => section.name), ['grad']);
  });
});

describe('windowed rows', () => {
  it('hold the screen and a few more', () => {
    const { first, last } = windowOf(4000, 800, 40);
    assert.ok(first <= 100 && last >= 120 && last - first < 60);
    assert.equal(windowOf(-200, 800, 40).first, 0);
  });
});
