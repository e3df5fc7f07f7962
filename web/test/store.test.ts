import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import { setImmediate as turn } from 'node:timers/promises';
import type { SeriesAnswer } from '../src/api.ts';
import { emptyPoints } from '../src/charts/series.ts';
import { SeriesStore } from '../src/run/store.ts';

type Asked = { metrics: string[]; from: number | null; to: number | null };

/** A server that holds steps 1..last of every metric, value = step, and answers when told to. */
function fixture(last = 10) {
  const asked: Asked[] = [];
  const held: (() => void)[] = [];
  const server = { last, failing: false };
  const store = new SeriesStore((metrics, [from, to]) => {
    asked.push({ metrics, from, to });
    return new Promise((resolve, reject) => held.push(() => (server.failing ? reject(new Error('down')) : resolve(metrics.map((metric) => answer(metric, from ?? 1, Math.min(to ?? server.last, server.last)))))));
  });
  const settle = async (): Promise<void> => { for (let i = 0; i < 10; i++) await turn(); };
  const reply = async (): Promise<void> => { await settle(); held.splice(0).forEach((send) => send()); await settle(); };
  const steps = (metric = 'm'): number[] => store.curve(metric).whole?.points.step ?? [];
  return { store, server, asked, settle, reply, steps };
}

function answer(metric: string, from: number, to: number): SeriesAnswer {
  const points = emptyPoints();
  for (let step = from; step <= to; step++) {
    for (const name of ['step', 'mean', 'min', 'max'] as const) points[name].push(step);
    points.count.push(1);
    for (const name of ['nan', 'pos_inf', 'neg_inf'] as const) points[name].push(0);
  }
  return { metric, bucket_width: 1, first_step: 1, last_step: to, points };
}

const upTo = (n: number): number[] => Array.from({ length: n }, (_, i) => i + 1);

describe('SeriesStore', () => {
  it('asks for all cards of a moment in one query', async () => {
    const { store, asked, reply } = fixture();
    for (const metric of ['a', 'b', 'c']) void store.need(metric, 100);
    void store.need('a', 100);
    await reply();
    assert.deepEqual(asked, [{ metrics: ['a', 'b', 'c'], from: null, to: null }]);
  });

  it('keeps points that arrive while the query is under way, and takes none twice', async () => {
    const { store, reply, steps, settle } = fixture(10);
    void store.need('m', 100);
    await settle();
    store.push('m', [9, 10, 11], [9, 10, 11]);
    store.push('m', [12], [12]);
    await reply();
    assert.deepEqual(steps(), upTo(12));
    assert.equal(store.curve('m').whole!.lastValue, 12);
  });

  it('fetches what fell between the query and the first live point', async () => {
    const { store, server, asked, reply, steps } = fixture(10);
    void store.need('m', 100);
    await reply();
    server.last = 14;
    store.push('m', [15], [15]);
    await reply();
    assert.deepEqual(asked.at(-1), { metrics: ['m'], from: 11, to: null });
    assert.deepEqual(steps(), upTo(15));
  });

  it('does not ask again for a metric that is sparse by nature', async () => {
    const { store, asked, reply } = fixture(10);
    void store.need('m', 100);
    await reply();
    store.push('m', [20], [20]);
    await reply();
    store.push('m', [30], [30]);
    store.push('m', [40], [40]);
    await reply();
    assert.equal(asked.length, 2);
  });

  it('asks from the last step after a reconnect', async () => {
    const { store, server, asked, reply, steps } = fixture(10);
    void store.need('m', 100);
    await reply();
    server.last = 25;
    store.catchUp();
    await reply();
    assert.deepEqual(asked.at(-1), { metrics: ['m'], from: 11, to: null });
    assert.deepEqual(steps(), upTo(25));
  });

  it('starts again after a resync', async () => {
    const { store, server, reply, steps } = fixture(10);
    void store.need('m', 100);
    await reply();
    server.last = 6;
    store.reload();
    await reply();
    assert.deepEqual(steps(), upTo(6));
  });

  it('says what went wrong and recovers on the next try', async () => {
    const { store, server, reply, steps } = fixture(3);
    server.failing = true;
    void store.need('m', 100);
    await reply();
    assert.equal(store.curve('m').error, 'down');
    server.failing = false;
    void store.need('m', 100);
    await reply();
    assert.equal(store.curve('m').error, null);
    assert.deepEqual(steps(), upTo(3));
  });

  it('zooms beside the whole curve and throws away an answer that nobody wants any more', async () => {
    const { store, reply, steps } = fixture(50);
    void store.need('m', 100);
    await reply();
    void store.zoom('m', [10, 20], 100);
    void store.zoom('m', [30, 40], 100);
    await reply();
    assert.deepEqual(store.curve('m').zoomed!.series.points.step[0], 30);
    assert.equal(steps().length, 50);
    void store.zoom('m', null, 100);
    assert.equal(store.curve('m').zoomed, null);
  });
});
