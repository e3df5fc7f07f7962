// The one tooltip of the page: lines of text next to the pointer.
import { signal } from '@preact/signals';

export interface Tip { x: number; y: number; lines: readonly TipLine[] }
export interface TipLine { text: string; strong?: boolean; tone?: 'bad' | 'muted' | undefined }

export const tip = signal<Tip | null>(null);

const WIDTH = 300;

export function TipBox() {
  const shown = tip.value;
  if (!shown) return null;
  const left = shown.x + 18 + WIDTH > innerWidth ? { right: `${innerWidth - shown.x + 14}px` } : { left: `${shown.x + 14}px` };
  const top = shown.y + 150 > innerHeight ? { bottom: `${innerHeight - shown.y + 12}px` } : { top: `${shown.y + 14}px` };
  return (
    <div class="tip" style={{ ...left, ...top }} aria-hidden="true">
      {shown.lines.map((line, i) => <div key={i} class={line.tone ?? ''}>{line.strong ? <strong>{line.text}</strong> : line.text}</div>)}
    </div>
  );
}
