import { $, download, h } from './dom.js';

const TYPES = { csv: 'text/csv', svg: 'image/svg+xml', json: 'application/json', trace: 'application/json' };

/** Save a schedule, its picture or its trace under the name that Python gives it. */
export async function saveAs(kind, ask) {
  const { name, text } = await ask(kind === 'png' ? 'svg' : kind);
  if (kind === 'png') download(name.replace(/svg$/, 'png'), await rasterised(text), 'image/png');
  else download(name, text, TYPES[kind]);
}

/** An SVG as the bytes of a PNG, at twice its size. */
async function rasterised(svg) {
  const image = h('img');
  image.src = URL.createObjectURL(new Blob([svg], { type: 'image/svg+xml' }));
  await image.decode();
  const canvas = h('canvas', { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((resolve) => { canvas.toBlob(resolve, 'image/png'); });
}

/** Call `opened(files)` when files are dropped on the page or chosen. */
export function receiveFiles(opened) {
  let depth = 0;
  const show = (change) => {
    depth = change ? Math.max(0, depth + change) : 0;
    $('drop').hidden = !depth;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes('Files');
  addEventListener('dragenter', (event) => hasFiles(event) && show(1));
  addEventListener('dragleave', (event) => hasFiles(event) && show(-1));
  addEventListener('dragover', (event) => hasFiles(event) && event.preventDefault());
  addEventListener('drop', (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    show(0);
    opened([...event.dataTransfer.files]);
  });
  $('open').addEventListener('change', () => {
    opened([...$('open').files]);
    $('open').value = '';
  });
}
