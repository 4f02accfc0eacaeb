const PATIENCE = 1500; // milliseconds that a stale answer may take before its worker is replaced

/** Thrown where a newer question took the place of one. */
export class Stale extends Error {}

/** One worker with Python. Of the questions with one `topic` only the newest is answered. */
export class Engine {
  #worker = null;
  #isReady = false;
  #running = null;
  #waiting = new Map();

  /** Load Python now, not with the first question; resolves when it is there. */
  warm() {
    return new Promise((resolve) => {
      this.#worker ??= this.#start();
      this.#worker.addEventListener('message', resolve, { once: true });
    });
  }

  /** Ask Python; rejects with `Stale` once a newer question has the same topic. */
  ask(topic, question, files = {}) {
    return new Promise((resolve, reject) => {
      this.#waiting.get(topic)?.reject(new Stale());
      this.#waiting.set(topic, { topic, question, files, resolve, reject });
      if (this.#running?.topic === topic) this.#abandon();
      this.#next();
    });
  }

  /** Drop the questions with this topic. */
  forget(topic) {
    this.#waiting.get(topic)?.reject(new Stale());
    this.#waiting.delete(topic);
    if (this.#running?.topic === topic) this.#abandon();
  }

  /** Reject the running question; its worker is replaced if the answer takes long. */
  #abandon() {
    this.#running.reject(new Stale());
    clearTimeout(this.#running.patience);
    this.#running.patience = setTimeout(() => this.#replace(), PATIENCE);
  }

  #next() {
    if (this.#running || !this.#waiting.size) return;
    const [topic, job] = this.#waiting.entries().next().value;
    this.#waiting.delete(topic);
    this.#running = job;
    this.#worker ??= this.#start();
    this.#worker.postMessage({ question: job.question, files: job.files });
  }

  #start() {
    const worker = new Worker('worker.js', { type: 'module' });
    this.#isReady = false;
    worker.onmessage = ({ data }) => {
      this.#isReady = true;
      if (!data.isReady) this.#settle('resolve', data);
    };
    worker.onerror = (event) => this.#settle('reject', new Error(event.message || 'Python could not be loaded'));
    return worker;
  }

  #settle(how, value) {
    const job = this.#running;
    this.#running = null;
    clearTimeout(job?.patience);
    job?.[how](value);
    this.#next();
  }

  #replace() {
    if (!this.#isReady) { // another worker would have to load Python again
      this.#running.patience = setTimeout(() => this.#replace(), PATIENCE);
      return;
    }
    this.#worker?.terminate();
    this.#worker = null;
    this.#running = null;
    this.#next();
  }
}
