// The site's search runs in a worker, and browsers start no worker for a page that was opened from a folder (file:).
// There a hidden frame does the worker's work. The file's name tells zensical that it need not load such a script
// from another server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this._waiting = [];
      this._frame = document.createElement("iframe");
      this._frame.hidden = true;
      document.documentElement.append(this._frame);
      const inner = this._frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this._deliver(data));
      const script = inner.document.createElement("script");
      script.src = new URL(url, document.baseURI).href;
      script.onload = () => {
        const waiting = this._waiting;
        this._waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      inner.document.documentElement.append(script);
    }

    postMessage(data) {
      if (this._waiting) {
        this._waiting.push(data);
        return;
      }
      const inner = this._frame.contentWindow;
      setTimeout(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this._frame.remove();
    }

    _deliver(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }
  };
}
