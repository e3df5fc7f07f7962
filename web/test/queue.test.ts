import assert from 'node:assert/strict';
import { describe, it } from 'node:test';
import { setImmediate as turn } from 'node:timers/promises';
import { DrawQueue } from '../src/charts/queue.ts';

const frame = (): Promise<void> => turn();

/** A queue whose clock moves only while something is drawn, `ms` for each draw. */
function fixture(burstMs = 1e9) {
  let now = 0;
  const log: string[] = [];
  const queue = new DrawQueue({ share: 0.5, burstMs }, frame, () => now);
  const draw = (name: string, ms = 10) => (): void => { log.push(name); now += ms; };
  const settle = async (): Promise<void> => { for (let i = 0; i < 40; i++) await turn(); };
  return { queue, log, draw, settle, pass: (ms: number) => { now += ms; } };
}

describe('DrawQueue', () => {
  it('draws a chart once however often it was asked for', async () => {
    const { queue, log, draw, settle } = fixture();
    const chart = {};
    for (let i = 0; i < 5; i++) queue.live(chart, draw(`live ${i}`));
    await settle();
    assert.deepEqual(log, ['live 4']);
  });

  it('lets first draws and user actions pass live redraws', async () => {
    const { queue, log, draw, settle } = fixture();
    queue.live({}, draw('live'));
    queue.first({}, draw('first'));
    await settle();
    assert.deepEqual(log, ['first', 'live']);
  });

  it('draws one chart per frame', async () => {
    let frames = 0;
    const at: number[] = [];
    const queue = new DrawQueue({ share: 1, burstMs: 1e9 }, async () => { await turn(); frames++; }, () => 0);
    for (let i = 0; i < 3; i++) queue.first({}, () => at.push(frames));
    for (let i = 0; i < 40; i++) await turn();
    assert.deepEqual(at, [1, 2, 3]);
  });

  it('spends a burst at once after a quiet spell, then keeps to its share', async () => {
    const { queue, log, draw, settle } = fixture(25);
    for (let i = 0; i < 12; i++) queue.live({}, draw(String(i)));
    await settle();
    // Each draw costs 10 ms and earns 5 back while it lasts: 25, 20, ..., 0, then the next would have to wait.
    assert.equal(log.length, 6);
  });

  it('is woken by a user action while it saves up', async () => {
    const { queue, log, draw, settle } = fixture(5);
    queue.live({}, draw('live', 200));
    queue.live({}, draw('waiting'));
    await settle();
    queue.first({}, draw('first'));
    await settle();
    assert.deepEqual(log.slice(0, 2), ['live', 'first']);
  });

  it('goes on after a chart that fails', async () => {
    const { queue, log, draw, settle } = fixture();
    const { error } = console;
    let said = 0;
    console.error = () => { said++; };
    queue.first({}, () => { throw new Error('no'); });
    queue.first({}, draw('next'));
    await settle();
    console.error = error;
    assert.deepEqual([log, said], [['next'], 1]);
  });

  it('forgets a chart that has left', async () => {
    const { queue, log, draw, settle } = fixture();
    const chart = {};
    queue.live(chart, draw('gone'));
    queue.drop(chart);
    await settle();
    assert.deepEqual(log, []);
  });
});
