// Runs our Python package, away from the thread that draws.
import { loadPyodide } from './pyodide/pyodide.mjs';

const ready = start();
ready.then(() => self.postMessage({ isReady: true }));

async function start() {
  const [python, archive] = await Promise.all([
    loadPyodide(),
    fetch('package.zip').then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(archive, 'zip', { extractDir: '/package' });
  python.runPython('import sys; sys.path.insert(0, "/package")');
  const { answer } = python.pyimport('megatron.zero_bubble.cli.playground.answers');
  return { python, answer };
}

self.onmessage = async ({ data: { question, files } }) => {
  const { python, answer } = await ready;
  for (const [name, text] of Object.entries(files)) python.FS.writeFile(name, text);
  self.postMessage(JSON.parse(answer(JSON.stringify(question))));
};
