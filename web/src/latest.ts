// Work asked for more often than it can be done: it never piles up, and never waits for the asking to pause.

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
