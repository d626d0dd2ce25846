// Search from a folder: a browser starts no worker for a page that it reads from disk, so that the
// script of the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      this.ready = new Promise((loaded) => (script.onload = loaded))
      frame.contentDocument.body.append(script)
    }
    async postMessage(data) {
      await this.ready
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }
  }
