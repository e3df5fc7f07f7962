// One IntersectionObserver and one ResizeObserver for all charts of the page.

type Seen = (visible: boolean) => void;
const seen = new WeakMap<Element, Seen>();
const resized = new WeakMap<Element, () => void>();

const intersections = new IntersectionObserver((changes) => {
  for (const change of changes) seen.get(change.target)?.(change.isIntersecting);
}, { rootMargin: '300px' });

const sizes = new ResizeObserver((changes) => {
  for (const change of changes) resized.get(change.target)?.();
});

/** Calls `onSeen` when `el` comes within 300 px of the screen or leaves it, `onResize` when its size changes. */
export function watchElement(el: Element, onSeen: Seen, onResize: () => void): () => void {
  seen.set(el, onSeen);
  resized.set(el, onResize);
  intersections.observe(el);
  sizes.observe(el);
  return () => {
    intersections.unobserve(el);
    sizes.unobserve(el);
  };
}
