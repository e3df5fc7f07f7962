// The time for the page, once a second, while somebody looks.
import { signal } from '@preact/signals';

export const nowS = signal(Date.now() / 1000);
setInterval(() => { if (!document.hidden) nowS.value = Date.now() / 1000; }, 1000);
