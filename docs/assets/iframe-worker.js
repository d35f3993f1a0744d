// Search from a folder: browsers give pages of files no workers, so what searches runs in a hidden frame.
if (location.protocol === "file:") {
  const load = (page, address) => new Promise((resolve, reject) => {
    const script = page.createElement("script")
    script.src = address
    script.onload = resolve
    script.onerror = reject
    page.body.append(script)
  })
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><title>search</title><body></body>")
      inside.document.close()
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inside.importScripts = (...scripts) => scripts.reduce(
        (before, each) => before.then(() => load(inside.document, each)), Promise.resolve())
      this.loaded = load(inside.document, address)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() { this.frame.remove() }
  }
}
