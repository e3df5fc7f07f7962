import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import { cleanRange, linearTicks, logTicks, niceStep, pxOf, stepAt, stepTicks, valueRange } from '../src/charts/axis.ts';
import { formatBytes, formatDuration, formatNumber, formatSeconds, formatTick, formatValue, unitOf } from '../src/format.ts';

describe('ticks', () => {
  it('stand at 1, 2, 2.5 or 5 times a power of ten', () => {
    for (const [span, count, step] of [[10, 5, 2], [1, 4, 0.25], [200_000, 4, 50_000], [0.0007, 7, 0.0001], [3, 10, 0.5]] as const) assert.equal(niceStep(span, count), step);
  });
  it('say bytes in powers of 1024', () => {
    assert.deepEqual(linearTicks([0, 4 * 2 ** 30], 4, 'bytes').labels, ['0', '1 GiB', '2 GiB', '3 GiB', '4 GiB']);
  });
  it('of steps are whole', () => {
    assert.deepEqual(stepTicks([0, 2], 8).values, [0, 1, 2]);
  });
  it('of a log axis are decades', () => {
    assert.deepEqual(logTicks([-4.2, -0.9], 6, 'plain').labels, ['1e-4', '0.001', '0.01', '0.1']);
  });
  it('differ where a narrow range lies far from zero', () => {
    const { labels } = linearTicks([65_535.9, 65_536.1], 4, 'plain');
    assert.equal(new Set(labels).size, labels.length);
  });
});

describe('ranges', () => {
  it('leave out what cannot be drawn', () => {
    assert.equal(valueRange([[NaN, Infinity]], false), null);
    assert.equal(valueRange([[0, -1]], true), null);
    const [low, high] = valueRange([[1, 2, NaN], [3]], false)!;
    assert.ok(low < 1 && low > 0.8 && high > 3 && high < 3.2);
  });
  it('of a constant have a height; of a count do not go far below zero', () => {
    const [low, high] = valueRange([[5, 5]], false)!;
    assert.ok(low < 5 && high > 5);
    assert.ok(valueRange([[0, 100]], false)![0] > -4);
    assert.deepEqual(valueRange([[0, 0]], false), [-0.04, 1]);
  });
  it('map a pixel to a step and back', () => {
    const margin = { l: 50, r: 10, t: 0, b: 0 };
    assert.equal(stepAt(50, 400, margin, [100, 200]), 100);
    assert.equal(pxOf(stepAt(123, 400, margin, [100, 200]), 400, margin, [100, 200]), 123);
  });
  it('from a drag are ordered, whole, inside and never empty', () => {
    assert.deepEqual(cleanRange(80.4, 10.6, [0, 100]), [10, 81]);
    assert.deepEqual(cleanRange(-5, 300, [0, 100]), [0, 100]);
    const [low, high] = cleanRange(50.2, 50.4, [0, 100]);
    assert.ok(high - low >= 2);
  });
});

describe('format', () => {
  it('reads the unit off the end of the name', () => {
    assert.deepEqual(['memory/allocated_bytes', 'memory/parameters_bytes/bfloat16', 'memory/parameters_bytes/my.critic', 'memory/alloc_retries', 'memory/fragmentation_fraction', 'time/step_s', 'time/data_wait_s', 'grad/zero_fraction', 'train/loss', 'train/bytes', 'plain_s'].map(unitOf), ['bytes', 'bytes', 'bytes', 'plain', 'fraction', 'seconds', 'seconds', 'fraction', 'plain', 'plain', 'seconds']);
  });
  it('writes numbers short and never as a false zero', () => {
    const cases: [number, string][] = [[0, '0'], [0.60124, '0.60124'], [65_536, '65,536'], [3.2e-7, '3.2e-7'], [NaN, 'NaN'], [Infinity, '+Inf'], [-Infinity, '−Inf'], [5e-324, '4.941e-324'], [1.5e12, '1.5e12']];
    for (const [value, text] of cases) assert.equal(formatNumber(value), text);
  });
  it('humanises bytes, seconds and durations', () => {
    assert.deepEqual([0, 1536, 3.25 * 2 ** 30].map((v) => formatBytes(v)), ['0 B', '1.5 KiB', '3.25 GiB']);
    assert.deepEqual([0, 0.0000021, 0.0512, 2.5].map((v) => formatSeconds(v)), ['0 s', '2.1 µs', '51.2 ms', '2.5 s']);
    assert.deepEqual([5, 65, 3_780, 100_000].map(formatDuration), ['5 s', '1 m 05 s', '1 h 03 m', '1 d 3 h']);
  });
  it('shows a dash for what is absent', () => {
    assert.equal(formatValue(null, 'bytes'), '–');
    assert.equal(formatValue(NaN, 'bytes'), 'NaN');
  });
  it('uses SI letters on axes', () => {
    assert.deepEqual([50_000, 1_500_000, 0.00003, 0.5].map((v) => formatTick(v, 'plain')), ['50k', '1.5M', '3e-5', '0.5']);
  });
});
