// Small line icons, drawn in the text colour.
const paths = {
  sun: 'M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1.1 1.1M11.9 11.9 13 13M3 13l1.1-1.1M11.9 4.1 13 3',
  moon: 'M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3Z',
  system: 'M2 3h12v8H2zM6 14h4M8 11v3',
  more: 'M3.5 8h.01M8 8h.01M12.5 8h.01',
  close: 'M4 4l8 8M12 4l-8 8',
  chevron: 'M6 4l4 4-4 4',
  search: 'M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM10.5 10.5 14 14',
  alert: 'M8 2 14.5 13.5h-13ZM8 6.5v3.2M8 11.6v.01',
} as const;

export function Icon({ name }: { name: keyof typeof paths }) {
  return (
    <svg class={`icon icon-${name}`} viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" fill="none" stroke="currentColor" stroke-width={name === 'more' ? 2.2 : 1.4} stroke-linecap="round" stroke-linejoin="round">
      <path d={paths[name]} />
    </svg>
  );
}

/** The mark of the product: a curve with a needle's swing. */
export function Logo() {
  return (
    <svg class="logo" viewBox="0 0 20 20" width="20" height="20" aria-hidden="true" fill="none" stroke-linecap="round" stroke-linejoin="round">
      <rect width="20" height="20" rx="5" fill="var(--accent-fill)" />
      <path d="M3.8 14.4 7.7 6.2l3.3 6.2 2-3.7 3.2 5.7" stroke="#fff" stroke-width="1.8" />
    </svg>
  );
}
