// A small menu on native <details>: closes on Esc, on a choice and when the focus leaves it.
import type { ComponentChildren } from 'preact';
import { useRef } from 'preact/hooks';
import { Icon } from './icons.tsx';

export interface MenuItem { label: string; checked?: boolean; run(): void }

export function Menu({ label, items }: { label: string; items: readonly MenuItem[] }) {
  const box = useRef<HTMLDetailsElement>(null);
  const close = (): void => { if (box.current) box.current.open = false; };
  return (
    <details
      class="menu" ref={box}
      onKeyDown={(event) => { if (event.key === 'Escape' && box.current?.open) { close(); event.stopPropagation(); box.current.querySelector('summary')?.focus(); } }}
      onFocusOut={(event) => { if (!box.current?.contains(event.relatedTarget as Node | null)) close(); }}
    >
      <summary aria-label={label}><Icon name="more" /></summary>
      <div class="menu-items">
        {items.map((item) => (
          <button key={item.label} type="button" aria-pressed={item.checked} onClick={() => { close(); item.run(); }}>
            <span class="check" aria-hidden="true">{item.checked ? '✓' : ''}</span>{item.label}
          </button>
        ))}
      </div>
    </details>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return <div class="empty"><h2>{title}</h2>{children}</div>;
}
