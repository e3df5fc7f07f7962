// The page's frame: header, the page for the address, the tooltip.
import { render } from 'preact';
import styles from './theme.css';
import { connection } from './live.ts';
import { followLink, route, runsHref } from './router.ts';
import { RunPage } from './pages/Run.tsx';
import { RunsPage } from './pages/Runs.tsx';
import { choice, chooseTheme, type ThemeChoice } from './theme.ts';
import { Icon, Logo } from './ui/icons.tsx';
import { Empty } from './ui/menu.tsx';
import { TipBox } from './ui/tip.tsx';

const NEXT: Record<ThemeChoice, ThemeChoice> = { system: 'light', light: 'dark', dark: 'system' };
const ICONS = { system: 'system', light: 'sun', dark: 'moon' } as const;
const WORDS = { connecting: 'connecting', live: 'live', lost: 'reconnecting' } as const;

function Header() {
  const at = route.value;
  return (
    <header class="top">
      <a class="brand" href={runsHref()} onClick={followLink}><Logo />Gradiometer</a>
      <nav aria-label="Pages"><a href={runsHref()} onClick={followLink} aria-current={at.page === 'runs' ? 'page' : undefined}>Runs</a></nav>
      <span class={`live ${connection.value}`} role="status" data-connection={connection.value}>
        <i aria-hidden="true" />{WORDS[connection.value]}
      </span>
      <button type="button" class="quiet theme" aria-label={`Theme: ${choice.value}. Change`} title={`Theme: ${choice.value}`} onClick={() => chooseTheme(NEXT[choice.value])}><Icon name={ICONS[choice.value]} /></button>
    </header>
  );
}

function App() {
  const at = route.value;
  return (
    <>
      <Header />
      {connection.value === 'lost' && <div class="lost" role="status">The connection to the server is lost. What you see may be old; it will catch up by itself.</div>}
      {at.page === 'runs' && <RunsPage />}
      {at.page === 'run' && <RunPage key={at.run} id={at.run} />}
      {at.page === 'missing' && <main><h1 class="visually-hidden">Not found</h1><Empty title="There is no such page"><p><a href={runsHref()} onClick={followLink}>All runs</a></p></Empty></main>}
      <TipBox />
    </>
  );
}

const sheet = document.createElement('style');
sheet.textContent = styles;
document.head.append(sheet);
render(<App />, document.getElementById('app')!);
