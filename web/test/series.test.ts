import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import { emptyPoints, Series, type Points } from '../src/charts/series.ts';

const flat = (n: number, width: number): Points => {
  const all = (v: number): number[] => Array.from({ length: n }, () => v);
  return { step: Array.from({ length: n }, (_, i) => i * width), count: all(width), mean: all(1), min: all(1), max: all(1), nan: all(0), pos_inf: all(0), neg_inf: all(0) };
};
const live = (n: number, value: (step: number) => number, capacity = 64): Series => {
  const series = new Series(1, emptyPoints(), null, capacity);
  for (let step = 1; step <= n; step++) series.push(step, value(step));
  return series;
};

describe('Series', () => {
  it('keeps a one-step spike through any number of halvings', () => {
    const series = live(10_000, (step) => (step === 777 ? 99 : 1));
    assert.equal(Math.max(...series.points.max), 99);
    assert.ok(series.length <= 64 && series.width >= 128);
    assert.equal(series.points.count.reduce((a, b) => a + b), 10_000);
  });

  it('keeps a single NaN as a count and leaves the mean finite', () => {
    const series = live(10_000, (step) => (step === 777 ? NaN : 2));
    assert.equal(series.numNonfinite, 1);
    assert.ok(series.points.mean.every((v) => v === 2));
    const bucket = series.points.nan.findIndex((n) => n === 1);
    assert.ok(series.points.step[bucket]! <= 777 && series.points.step[bucket]! + series.width > 777);
  });

  it('counts each kind of non-finite value and remembers the last one as logged', () => {
    const series = live(3, (step) => [NaN, Infinity, -Infinity][step - 1]!, 2);
    assert.deepEqual([series.points.nan, series.points.pos_inf, series.points.neg_inf].map((list) => list.reduce((a, b) => a + b)), [1, 1, 1]);
    assert.equal(series.lastValue, -Infinity);
    assert.ok(series.points.mean.every(Number.isNaN));
  });

  it('ignores steps seen before', () => {
    const series = live(4, () => 1);
    assert.equal(series.push(2, 50), false);
    assert.equal(series.push(4, 50), false);
    assert.deepEqual(series.points.max, [1, 1, 1, 1]);
  });

  it('appends live points at the width that it was fetched with, aligned to its multiples', () => {
    const series = new Series(4, flat(2, 4), 7, 64);
    for (const step of [8, 9, 11, 12]) series.push(step, step);
    assert.deepEqual(series.points.step, [0, 4, 8, 12]);
    assert.deepEqual(series.points.count, [4, 4, 3, 1]);
    assert.equal(series.points.mean[2], (8 + 9 + 11) / 3);
  });

  it('takes in a tail of narrower buckets without moving its own edges', () => {
    const series = new Series(4, flat(2, 4), 6, 64);
    series.absorb(1, { ...flat(3, 1), step: [7, 8, 9], mean: [5, 2, 3], min: [5, 2, 3], max: [5, 2, 3] }, 9);
    assert.deepEqual(series.points.step, [0, 4, 8]);
    assert.equal(series.points.max[1], 5);
    assert.equal(series.lastStep, 9);
    assert.equal(series.lastValue, 3);
  });

  it('widens for a tail of wider buckets', () => {
    const series = new Series(1, flat(4, 1), 3, 64);
    series.absorb(8, { ...flat(1, 8), step: [8] }, 15);
    assert.equal(series.width, 8);
    assert.deepEqual(series.points.step, [0, 8]);
    assert.deepEqual(series.points.count, [4, 8]);
  });

  it('finds the bucket for a step, and the nearest across a hole', () => {
    const series = new Series(1, { ...flat(3, 1), step: [0, 10, 20] }, 20, 64);
    assert.deepEqual([-5, 0, 4, 6, 10, 19, 99].map((step) => series.indexAt(step)), [0, 0, 0, 1, 1, 2, 2]);
    assert.equal(new Series(1, emptyPoints(), null, 8).indexAt(3), -1);
  });
});
