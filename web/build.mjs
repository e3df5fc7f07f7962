// src -> ../server/gradiometer_server/static: hashed app files, Plotly as a classic script of its own, .br and .gz siblings.
import { build, context, transform } from 'esbuild';
import { createHash } from 'node:crypto';
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { basename, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { brotliCompressSync, constants, gzipSync } from 'node:zlib';
import { parenthesise } from './plotly-patch.mjs';

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, '..', 'server', 'gradiometer_server', 'static');
const watching = process.argv.includes('--watch');

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });

const plotlySource = readFileSync(createRequire(import.meta.url).resolve('plotly.js-cartesian-dist-min'), 'utf8');
const plotlyCopy = parenthesise(plotlySource);
const plotlyFile = `plotly-${createHash('sha256').update(plotlyCopy).digest('hex').slice(0, 8).toUpperCase()}.js`;
writeFileSync(join(out, plotlyFile), plotlyCopy);

function writePage(outputs) {
  const main = basename(Object.keys(outputs).find((file) => file.endsWith('.js')));
  const page = readFileSync(join(here, 'src', 'index.html'), 'utf8').replace('PLOTLY_FILE', plotlyFile).replace('MAIN_FILE', main);
  writeFileSync(join(out, 'index.html'), page);
}

/** CSS travels inside the script: the page is empty until the script runs, so a file of its own would only add a request. */
const cssAsText = {
  name: 'css',
  setup: (b) => void b.onLoad({ filter: /\.css$/ }, async ({ path }) => {
    const { code } = await transform(readFileSync(path, 'utf8'), { loader: 'css', minify: !watching, target: 'es2022' });
    return { contents: code, loader: 'text' };
  }),
};

const options = {
  absWorkingDir: here,
  entryPoints: ['src/main.tsx'],
  bundle: true,
  format: 'esm',
  target: 'es2022',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  outdir: out,
  metafile: true,
  entryNames: '[name]-[hash]',
  minify: !watching,
  sourcemap: watching ? 'inline' : false,
  define: { PLOTLY_FILE: JSON.stringify(plotlyFile) },
  plugins: [cssAsText, { name: 'page', setup: (b) => void b.onEnd(({ metafile }) => { if (metafile) writePage(metafile.outputs); }) }],
};

if (watching) {
  await (await context(options)).watch();
} else {
  await build(options);
  for (const file of readdirSync(out)) {
    const bytes = readFileSync(join(out, file));
    writeFileSync(join(out, `${file}.gz`), gzipSync(bytes, { level: 9 }));
    writeFileSync(join(out, `${file}.br`), brotliCompressSync(bytes, { params: { [constants.BROTLI_PARAM_SIZE_HINT]: bytes.length } }));
  }
}
