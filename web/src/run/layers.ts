// What heat map and gradient flow share: the statistic, the step, and a fetch that never piles up.
import { computed, signal, type ReadonlySignal } from '@preact/signals';
import type { Unit } from '../format.ts';

export const STATISTICS = ['norm', 'rms', 'abs_max', 'mean', 'std', 'zero_fraction', 'num_nonfinite'] as const;

export const STATISTIC_LABELS: Record<string, string> = {
  norm: 'norm', rms: 'RMS', abs_max: 'max |g|', mean: '|mean|', std: 'std', zero_fraction: 'zero fraction', num_nonfinite: 'non-finite count',
};

export const unitOfStatistic = (statistic: string): Unit => (statistic === 'zero_fraction' ? 'fraction' : 'plain');

export class LayerView {
  readonly statistic = signal<string>('norm');
  /** Step of the gradient flow; null follows the newest. */
  readonly step = signal<number | null>(null);
  readonly newest: ReadonlySignal<number | null>;
  readonly shownStep = computed(() => this.step.value ?? this.newest.value);

  constructor(newest: ReadonlySignal<number | null>) {
    this.newest = newest;
  }
}

/** Runs `job` at most once at a time and once per `pauseMs`; calls in between become one more run at the end. */
export class Latest {
  private readonly job: () => Promise<void>;
  private readonly pauseMs: number;
  private running = false;
  private wanted = false;
  private stopped = false;

  constructor(job: () => Promise<void>, pauseMs: number) {
    this.job = job;
    this.pauseMs = pauseMs;
  }

  call(): void {
    this.wanted = true;
    if (!this.running) void this.loop();
  }

  stop(): void {
    this.stopped = true;
  }

  private async loop(): Promise<void> {
    this.running = true;
    while (this.wanted && !this.stopped) {
      this.wanted = false;
      await this.job();
      if (this.pauseMs) await new Promise((resolve) => setTimeout(resolve, this.pauseMs));
    }
    this.running = false;
  }
}
