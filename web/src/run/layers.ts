// What heat map and gradient flow share: the statistic and the step.
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
