// Runs our Python package, away from the thread that draws.
import { startPython } from './python.mjs';

const ready = start();
ready.then(() => self.postMessage({ isReady: true }), () => {}); // each question is answered with the error

async function start() {
  const [archive, snapshot] = await Promise.all([bytes('package.zip'), bytes('python.snapshot')]);
  performance.mark('fetched');
  const python = await restored(archive, snapshot).catch(() => startPython(archive));
  performance.mark('started');
  return { python, answer: python.globals.get('answer') };
}

/** Start Python from the snapshot of its memory; rejects where there is none, or this browser cannot take it. */
async function restored(archive, snapshot) {
  const unpacked = new Blob([snapshot]).stream().pipeThrough(new DecompressionStream('gzip'));
  const memory = new Uint8Array(await new Response(unpacked).arrayBuffer());
  performance.mark('unpacked');
  const python = await startPython(archive, { snapshot: memory });
  performance.mark('restored');
  return python;
}

async function bytes(file) {
  return (await fetch(file)).arrayBuffer();
}

self.onmessage = async ({ data: { question, files } }) => {
  try {
    const { python, answer } = await ready;
    for (const [name, text] of Object.entries(files)) python.FS.writeFile(name, text);
    self.postMessage(JSON.parse(answer(JSON.stringify(question))));
  } catch (error) {
    self.postMessage({ error: `Python failed: ${error.message.trim().split('\n').at(-1)}`, flag: 'schedule' });
  }
};
