// The search runs in a worker, which browsers refuse to pages that are opened from a folder. There an invisible frame does the same.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.deliver = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      this.ready = new Promise((done) => { this.frame.onload = done; });
      this.frame.srcdoc = `<script>postMessage = (data) => frameElement.deliver(data)</script><script src="${url}"></script>`;
      document.body.append(this.frame);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
    }
    terminate() { this.frame.remove(); }
  };
}
