// Hover, drag to zoom and double click on a static plot: a line and a selection box of our own over it.
// Plotly's hover redraws labels in every chart (57 ms a move over 20 charts, measured); moving one element costs nothing.
import type { Margin } from './axis.ts';

export interface PointerHandlers {
  /** Pixel in the plot's box and on the screen, or null when the pointer has left. */
  hover(at: { px: number; py: number; clientX: number; clientY: number } | null): void;
  /** A drag over at least a few pixels ended. */
  select?(fromPx: number, toPx: number): void;
  reset?(): void;
  /** Pressed and released in one place. */
  click?(px: number): void;
}

export interface PointerOverlay {
  /** Moves the cursor line, null hides it. */
  cursor(px: number | null): void;
  /** True between press and release: the plot should hold still. */
  readonly dragging: boolean;
  remove(): void;
}

const LEAST_DRAG_PX = 6;

function part(className: string, host: HTMLElement, margin: Margin): HTMLElement {
  const el = document.createElement('div');
  el.className = className;
  el.style.top = `${margin.t}px`;
  el.style.bottom = `${margin.b}px`;
  el.hidden = true;
  host.append(el);
  return el;
}

/** `host` is the positioned box around the plot; both have the same size. */
export function attachPointer(host: HTMLElement, margin: () => Margin, handlers: PointerHandlers): PointerOverlay {
  const line = part('cursor', host, margin());
  const box = part('selection', host, margin());
  const stop = new AbortController();
  let pressed: number | null = null;

  const place = (event: PointerEvent): { px: number; py: number } => {
    const rect = host.getBoundingClientRect();
    const { l, r } = margin();
    return { px: Math.min(rect.width - r, Math.max(l, event.clientX - rect.left)), py: event.clientY - rect.top };
  };
  const on = (name: string, listener: (event: PointerEvent) => void): void => host.addEventListener(name, listener as EventListener, { signal: stop.signal });
  const release = (): void => {
    pressed = null;
    box.hidden = true;
  };

  on('pointermove', (event) => {
    const { px, py } = place(event);
    if (pressed !== null) {
      box.hidden = Math.abs(px - pressed) < LEAST_DRAG_PX;
      box.style.left = `${Math.min(px, pressed)}px`;
      box.style.width = `${Math.abs(px - pressed)}px`;
    }
    handlers.hover({ px, py, clientX: event.clientX, clientY: event.clientY });
  });
  on('pointerleave', () => { if (pressed === null) handlers.hover(null); });
  on('pointerdown', (event) => {
    // A finger scrolls the page; only a mouse or a pen selects.
    if (!handlers.select || event.button !== 0 || event.pointerType === 'touch') return;
    pressed = place(event).px;
    host.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  on('pointerup', (event) => {
    const start = pressed;
    const { px } = place(event);
    release();
    if (start === null) return;
    if (Math.abs(px - start) >= LEAST_DRAG_PX) handlers.select?.(start, px);
    else handlers.click?.(px);
  });
  on('pointercancel', release);
  on('dblclick', () => handlers.reset?.());

  return {
    cursor(px) {
      line.hidden = px === null;
      if (px !== null) line.style.transform = `translateX(${px.toFixed(1)}px)`;
    },
    get dragging() { return pressed !== null; },
    remove() {
      stop.abort();
      line.remove();
      box.remove();
    },
  };
}
