// One chart per frame. First draws and user actions go first; live redraws may use a share of the main thread.

type Draw = () => unknown;

export interface Pace {
  /** Share of the main thread that live redraws may take over time. */
  share: number;
  /** Redraw time that may be spent at once after a quiet spell, so that an idle page draws a point in the next frame. */
  burstMs: number;
}

const nextAnimationFrame = (): Promise<void> => new Promise((resolve) => requestAnimationFrame(() => resolve()));

/**
 * Jobs are keyed by chart: a chart that is asked for twice before its turn draws once. A hidden tab gets no frames and
 * so draws nothing. The budget is a bucket of milliseconds that refills with time and pays for live redraws.
 */
export class DrawQueue {
  readonly cost = { draws: 0, ms: 0, liveMs: 0, longestMs: 0 };
  private readonly urgent = new Map<object, Draw>();
  private readonly waiting = new Map<object, Draw>();
  private running = false;
  private wake: (() => void) | null = null;
  private budgetMs: number;
  private refilledAt: number;
  private readonly pace: Pace;
  private readonly frame: () => Promise<void>;
  private readonly clock: () => number;

  constructor(pace: Pace = { share: 0.3, burstMs: 120 }, frame = nextAnimationFrame, clock = () => performance.now()) {
    this.pace = pace;
    this.frame = frame;
    this.clock = clock;
    this.budgetMs = pace.burstMs;
    this.refilledAt = clock();
  }

  /** For a first draw or what a user asked for. */
  first(key: object, draw: Draw): void {
    this.waiting.delete(key);
    this.urgent.set(key, draw);
    this.wake?.();
    void this.run();
  }

  /** For new points. */
  live(key: object, draw: Draw): void {
    if (!this.urgent.has(key)) this.waiting.set(key, draw);
    void this.run();
  }

  drop(key: object): void {
    this.urgent.delete(key);
    this.waiting.delete(key);
  }

  private async run(): Promise<void> {
    if (this.running) return;
    this.running = true;
    while (this.urgent.size || this.waiting.size) {
      if (!this.urgent.size) await this.afford();
      await this.frame();
      await this.drawOne();
    }
    this.running = false;
  }

  private async drawOne(): Promise<void> {
    const isUrgent = this.urgent.size > 0;
    const jobs = isUrgent ? this.urgent : this.waiting;
    const next = jobs.entries().next();
    if (next.done) return;
    const [key, draw] = next.value;
    jobs.delete(key);
    const start = this.clock();
    try {
      await draw();
    } catch (error) {
      console.error('a chart could not be drawn', error);
    }
    this.spend(this.clock() - start, isUrgent);
  }

  private spend(ms: number, isUrgent: boolean): void {
    this.cost.draws++;
    this.cost.ms += ms;
    this.cost.longestMs = Math.max(this.cost.longestMs, ms);
    if (isUrgent) return;
    this.cost.liveMs += ms;
    this.budgetMs -= ms;
  }

  private refill(): void {
    const now = this.clock();
    this.budgetMs = Math.min(this.pace.burstMs, this.budgetMs + (now - this.refilledAt) * this.pace.share);
    this.refilledAt = now;
  }

  private async afford(): Promise<void> {
    this.refill();
    if (this.budgetMs >= 0) return;
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, -this.budgetMs / this.pace.share);
      this.wake = () => { clearTimeout(timer); resolve(); };
    });
    this.wake = null;
    this.refill();
  }
}

export const queue = new DrawQueue();
