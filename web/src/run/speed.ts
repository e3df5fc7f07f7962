// Steps per second over the last seconds. Pure: time is an argument.

const WINDOW_S = 15;

export class SpeedMeter {
  private seen: { step: number; timeS: number }[] = [];

  /** Notes that `step` was last seen at `timeS` (monotonic seconds); returns steps/s, null until a second has passed. */
  saw(step: number, timeS: number): number | null {
    this.seen = this.seen.filter((entry) => timeS - entry.timeS <= WINDOW_S);
    this.seen.push({ step, timeS });
    const first = this.seen[0]!;
    const span = timeS - first.timeS;
    return span >= 1 && step > first.step ? (step - first.step) / span : null;
  }
}
