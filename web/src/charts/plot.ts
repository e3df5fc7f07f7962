// A plot's life on the page: drawn through the queue while near the screen, purged when it leaves.
import type { Figure } from './figure.ts';
import { CONFIG, plotly, purge } from './plotly.ts';
import { queue } from './queue.ts';
import { watchElement } from './visible.ts';

export interface PlotOptions {
  /** The figure for a box of this size; null: nothing to draw yet. */
  figure(width: number, height: number): Figure | null;
  /** Called after each draw: what is on the screen now is what the last figure said. */
  drawn?(): void;
  /** The plot came near the screen for the first time, or again. */
  shown?(): void;
  /** While true, live redraws are put off. */
  busy?(): boolean;
}

export class Plot {
  private readonly el: HTMLElement;
  private readonly options: PlotOptions;
  private readonly stop: () => void;
  private near = false;
  private width = 0;

  constructor(el: HTMLElement, options: PlotOptions) {
    this.el = el;
    this.options = options;
    this.stop = watchElement(el, (near) => this.moved(near), () => this.resized());
  }

  get isNear(): boolean {
    return this.near;
  }

  /** For what the user asked for. */
  redraw(): void {
    if (this.near) queue.first(this, () => this.draw());
  }

  /** For new points. */
  redrawLive(): void {
    if (this.near && !this.options.busy?.()) queue.live(this, () => this.draw());
  }

  remove(): void {
    this.stop();
    queue.drop(this);
    purge(this.el);
  }

  private moved(near: boolean): void {
    if (near === this.near) return;
    this.near = near;
    if (near) {
      this.options.shown?.();
      this.redraw();
    } else {
      queue.drop(this);
      purge(this.el);
    }
  }

  private resized(): void {
    if (this.el.clientWidth === this.width) return;
    this.redraw();
  }

  private async draw(): Promise<void> {
    const { clientWidth, clientHeight } = this.el;
    const figure = this.near && clientWidth > 0 ? this.options.figure(clientWidth, clientHeight) : null;
    if (!figure) return;
    this.width = clientWidth;
    const api = await plotly();
    if (!this.near) return;
    await api.react(this.el, figure.data, figure.layout, CONFIG);
    this.options.drawn?.();
  }
}
