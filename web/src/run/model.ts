// One run as the page knows it: what it is, its metrics, alerts and curves, and the view that its charts share.
import { batch, computed, signal } from '@preact/signals';
import { getAlerts, getMetrics, getRun, querySeries, toNumber, toValue, type Alert, type Metric, type RunDetail } from '../api.ts';
import type { Range } from '../charts/axis.ts';
import { Latest } from '../latest.ts';
import { subscribe, type LiveMessage, type PointsMessage } from '../live.ts';
import { rangeFromUrl, rangeToUrl } from '../router.ts';
import { SeriesStore } from './store.ts';
import { SpeedMeter } from './speed.ts';

/** A young run reports faster than this; its lists are read again no more often. */
const REFRESH_PAUSE_MS = 150;

export class RunModel {
  readonly id: string;
  readonly run = signal<RunDetail | null>(null);
  readonly metrics = signal<Metric[]>([]);
  readonly alerts = signal<Alert[]>([]);
  readonly ready = signal(false);
  readonly error = signal<string | null>(null);
  /** Last step seen in any way, live points included. */
  readonly lastStep = signal<number | null>(null);
  readonly firstStep = signal<number | null>(null);
  readonly layersStep = signal<number | null>(null);
  readonly hasLayers = computed(() => this.layersStep.value !== null || this.metrics.value.some((metric) => metric.kind === 'layer'));
  readonly speed = signal<number | null>(null);
  /** The step under the pointer, for the line that all charts share. */
  readonly cursor = signal<number | null>(null);
  /** null: the whole run, following it live. */
  readonly zoom = signal<Range | null>(rangeFromUrl());
  readonly sharedZoom = signal(true);
  /** Last value by metric, as logged. */
  readonly last = new Map<string, number | null>();
  readonly store: SeriesStore;

  private readonly meter = new SpeedMeter();
  private unsubscribe: (() => void) | null = null;
  private readonly refresher = new Latest(() => this.read(), REFRESH_PAUSE_MS);
  private attempts: number | null = null;

  constructor(id: string) {
    this.id = id;
    this.store = new SeriesStore((metrics, range, buckets) => querySeries(id, metrics, range, buckets));
  }

  private readonly names = computed(() => new Set(this.metrics.value.map((metric) => metric.name)));

  /** The range that unzoomed charts show: the same for every metric, so that charts line up. */
  readonly domain = computed<Range>(() => {
    const first = this.firstStep.value ?? 0;
    return [first, Math.max(this.lastStep.value ?? 1, first + 1)];
  });

  start(): void {
    this.unsubscribe = subscribe(this.id, {
      onMessage: (message) => this.receive(message),
      onOpen: (again) => this.opened(again),
    });
    this.refresh();
  }

  stop(): void {
    this.unsubscribe?.();
    this.refresher.stop();
  }

  /** Reads run, metrics and alerts again, soon; curves keep what they have. */
  refresh(): void {
    this.refresher.call();
  }

  private async read(): Promise<void> {
    try {
      const [run, metrics, alerts] = await Promise.all([getRun(this.id), getMetrics(this.id), getAlerts(this.id)]);
      batch(() => {
        this.takeRun(run);
        this.takeMetrics(metrics);
        this.alerts.value = alerts;
        this.error.value = null;
        this.ready.value = true;
      });
    } catch (error) {
      this.error.value = (error as Error).message;
    }
  }

  zoomTo(range: Range | null): void {
    this.zoom.value = range;
    rangeToUrl(range);
  }

  private opened(again: boolean): void {
    this.store.catchUp();
    if (again || this.error.value) this.refresh();
  }

  private receive(message: LiveMessage): void {
    // Opened a moment before the run's first report, the page was told that there is no such run; now there is.
    if (!this.ready.value) this.refresh();
    if (message.type === 'points') this.takePoints(message);
    else if (message.type === 'alert') this.takeAlert(message.alert);
    else if (message.type === 'run') this.takeRun({ ...this.run.value, ...message.run } as RunDetail);
    else if (message.type === 'metrics') this.refresh();
    else if (message.type === 'resync') {
      this.store.reload();
      this.refresh();
    }
  }

  private takeRun(run: RunDetail): void {
    this.run.value = run;
    this.sawSteps(null, run.last_step);
    for (const [metric, value] of Object.entries(run.latest ?? {})) if (!this.last.has(metric)) this.last.set(metric, toValue(value));
    // A new attempt resumes from a checkpoint and rewrites steps: what was drawn of them is no longer true.
    if (this.attempts !== null && run.attempts > this.attempts) {
      this.store.reload();
      this.refresh();
    }
    this.attempts = run.attempts;
  }

  private takeMetrics(metrics: Metric[]): void {
    this.metrics.value = metrics;
    for (const metric of metrics) {
      this.last.set(metric.name, toValue(metric.last));
      this.sawSteps(metric.first_step, metric.last_step);
      if (metric.kind === 'layer' && metric.last_step !== null) this.layersStep.value = Math.max(this.layersStep.value ?? 0, metric.last_step);
    }
  }

  // Hot path: once per live message. It must not fetch, and must not touch the DOM.
  private takePoints(message: PointsMessage): void {
    let known = true;
    const names = this.names.value;
    batch(() => {
      for (const { metric, steps, values } of message.series) {
        const floats = values.map(toNumber);
        known &&= names.has(metric);
        if (floats.length) this.last.set(metric, floats.at(-1)!);
        this.sawSteps(steps[0] ?? null, steps.at(-1) ?? null);
        this.store.push(metric, steps, floats);
      }
      if (typeof message.layers_step === 'number') this.layersStep.value = message.layers_step;
    });
    if (!known) this.refresh();
  }

  private takeAlert(alert: Alert): void {
    const others = this.alerts.value.filter((other) => other.id !== alert.id);
    this.alerts.value = [alert, ...others].sort((a, b) => b.opened_s - a.opened_s);
  }

  private sawSteps(first: number | null, last: number | null): void {
    if (first !== null && (this.firstStep.value === null || first < this.firstStep.value)) this.firstStep.value = first;
    if (last === null || (this.lastStep.value !== null && last <= this.lastStep.value)) return;
    this.lastStep.value = last;
    this.speed.value = this.meter.saw(last, performance.now() / 1000);
  }
}
