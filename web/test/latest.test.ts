import assert from 'node:assert/strict';
import { describe, it, mock } from 'node:test';
import { setImmediate as turn } from 'node:timers/promises';
import { Latest } from '../src/latest.ts';

describe('Latest', () => {
  it('is not held up by being asked all the time', async () => {
    mock.timers.enable({ apis: ['setTimeout'] });
    let done = 0;
    const latest = new Latest(async () => { done++; }, 150);
    for (let ms = 0; ms < 1_500; ms += 50) {
      latest.call();
      await turn();
      mock.timers.tick(50);
      await turn();
    }
    mock.timers.reset();
    assert.equal(done, 11, 'at 0, 150, ... 1500 ms');
  });

  it('runs once more for what was asked while it ran, and not at the same time', async () => {
    const ends: (() => void)[] = [];
    const latest = new Latest(() => new Promise((end) => ends.push(end)), 0);
    latest.call();
    latest.call();
    latest.call();
    assert.equal(ends.length, 1);
    ends[0]!();
    await turn();
    assert.equal(ends.length, 2);
    ends[1]!();
    await turn();
    assert.equal(ends.length, 2);
  });
});
