// The state of the page: the flags of the command line, those that both schedules have and those of each.

const SIZE = ['pipeline-size', 'num-microbatches'];
const PANES = 'ab';
const LONGEST_LINK = 200_000; // characters; browsers take more, chat programs do not

export const copy = (state) => structuredClone(state);

/** Flags of a schedule's own that its entry of the registry does not take are left out. */
export function applies(flag, pane, entry) {
  if (pane.run) return false;
  if (flag === 'hardware-queues' || flag === 'post-validation') return true;
  if (flag === 'steps') return Boolean(pane['post-validation']);
  if (pane.input || !entry) return false;
  if (flag === 'num-chunks') return entry.takesChunks || entry.takesPlacement;
  if (flag === 'placement') return entry.takesPlacement;
  if (flag === 'memory-limit') return entry.takesLimit;
  if (flag === 'microbatch-group-size') return entry.placement === 'interleaved' || Number(pane['num-chunks']) > 1;
  return true;
}

/** The memory limit of a schedule, of several ranks the largest; null if it has none. */
export function limitOf(pane, entry) {
  if (!applies('memory-limit', pane, entry)) return null;
  const values = String(pane['memory-limit'] ?? '').split(',').map(Number).filter((value) => value > 0);
  return values.length ? Math.max(...values) : null;
}

/** The command line of one schedule. */
export function words(state, pane, entry) {
  const { costs, ...shared } = state.shared;
  const flags = Object.entries(costs ? { costs } : shared).filter(([flag]) => !SIZE.includes(flag));
  if (costs && shared['no-overlap-communication']) flags.push(['no-overlap-communication', true]);
  if (pane.input) flags.unshift(['input', pane.input]);
  else flags.unshift(['schedule', pane.schedule], ...SIZE.map((flag) => [flag, shared[flag]]));
  for (const [flag, value] of Object.entries(pane)) {
    if (!['schedule', 'input', 'run'].includes(flag) && applies(flag, pane, entry)) flags.push([flag, value]);
  }
  return flags.filter(([, value]) => value !== '' && value !== undefined && value !== null && value !== false)
    .map(([flag, value]) => (value === true ? `--${flag}` : `--${flag}=${value}`));
}

/** The state as the fragment of an address. Files are in it, packed; null if they are too long for a link. */
export async function toFragment(state) {
  const pairs = Object.entries(state.shared);
  state.panes.forEach((pane, k) => pairs.push(...Object.entries(pane).map(([flag, value]) => [`${PANES[k]}.${flag}`, value])));
  const inUse = new Set([state.shared.costs, ...state.panes.flatMap((pane) => [pane.input, pane.run])]);
  for (const [name, text] of Object.entries(state.files)) if (inUse.has(name)) pairs.push([`file.${name}`, await pack(text)]);
  const fragment = pairs.filter(([, value]) => value !== '' && value !== false && value !== null && value !== undefined)
    .map(([flag, value]) => `${encodeURIComponent(flag)}=${encodeURIComponent(value).replaceAll('%2C', ',')}`).join('&');
  return fragment.length > LONGEST_LINK ? null : fragment;
}

/** The state that a fragment holds; null if it holds none. */
export async function fromFragment(fragment) {
  const state = { shared: {}, panes: [], files: {} };
  for (const [key, value] of new URLSearchParams(fragment.replaceAll('+', '%2B'))) {
    const [, prefix, flag] = /^(?:(a|b|file)\.)?(.+)$/.exec(key);
    const plain = value === 'true' ? true : value;
    if (prefix === 'file') state.files[flag] = await unpack(value);
    else if (prefix) (state.panes[PANES.indexOf(prefix)] ??= {})[flag] = plain;
    else state.shared[flag] = plain;
  }
  state.panes = state.panes.filter(Boolean);
  return state.panes.length ? state : null;
}

/** Fits lists with one entry for each rank (or pair of ranks) to another number of ranks. */
export class Lists {
  #whole = new Map(); // name -> the list before it was cut, for whoever types 16 and is at 1 or at 6 on the way

  /** The list with `length` entries; the last entry is repeated. A value that is no list stays. */
  resized(name, value, length) {
    if (typeof value !== 'string' || !value.includes(',')) return value;
    const known = this.#whole.get(name) ?? '';
    const whole = known.startsWith(`${value},`) ? known : value;
    this.#whole.set(name, whole);
    const entries = whole.split(',');
    return Array.from({ length }, (_, k) => entries[Math.min(k, entries.length - 1)]).join(',');
  }

  /** Forget the list before it was cut, because the reader typed another. */
  forget(name) {
    this.#whole.delete(name);
  }
}

async function pack(text) {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream('deflate-raw'));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join('')).replaceAll('+', '-').replaceAll('/', '_');
}

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.replaceAll('-', '+').replaceAll('_', '/')), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'))).text();
}
