"""What an API server of Kubernetes answers about DaskClusters, from memory: no real one can be had without a container engine. No operator acts on them."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import yaml

GROUP = "kubernetes.dask.org"
KIND = {
    "name": "daskclusters",
    "singularName": "daskcluster",
    "namespaced": True,
    "kind": "DaskCluster",
    "verbs": ["create", "delete", "get", "list"],
}


class _Handler(BaseHTTPRequestHandler):
    """Answers from the dictionary `clusters` of the server, by name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        parts = urlsplit(self.path)
        place = parts.path.rstrip("/")
        words = place.split("/")
        if place == "/version":
            self._send({"major": "1", "minor": "31", "gitVersion": "v1.31.0"})
        elif place == "/api":
            self._send({"kind": "APIVersions", "versions": ["v1"]})
        elif place == "/api/v1":
            self._send({"kind": "APIResourceList", "groupVersion": "v1", "resources": []})
        elif place == "/apis":
            version = {"groupVersion": f"{GROUP}/v1", "version": "v1"}
            group = {"name": GROUP, "versions": [version], "preferredVersion": version}
            self._send({"kind": "APIGroupList", "groups": [group]})
        elif place == f"/apis/{GROUP}/v1":
            self._send(
                {"kind": "APIResourceList", "groupVersion": f"{GROUP}/v1", "resources": [KIND]}
            )
        elif words[-1] == "daskclusters":
            wanted = parse_qs(parts.query).get("labelSelector", [""])[0]
            found = [each for each in self.server.clusters.values() if _has(each, wanted)]
            self._send({"kind": "DaskClusterList", "items": found, "metadata": {}})
        else:
            self._find(words[-1])

    def do_POST(self):
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.clusters[made["metadata"]["name"]] = made
        self.server.made.append(made)
        self._send(made, 201)

    def do_DELETE(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = urlsplit(self.path).path.rstrip("/").rpartition("/")[2]
        self._find(name)
        self.server.clusters.pop(name, None)

    def log_message(self, *_):
        pass

    def _find(self, name):
        found = self.server.clusters.get(name)
        missing = {"kind": "Status", "code": 404, "message": "not found", "reason": "NotFound"}
        self._send(found or missing, 200 if found else 404)

    def _send(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _has(cluster, selector):
    labels = cluster["metadata"].get("labels", {})
    pairs = [each.partition("=") for each in selector.split(",") if each]
    return all(labels.get(name) == value.removeprefix("=") for name, _, value in pairs)


@contextmanager
def serving(folder):
    """Yield the server, with `clusters` by name and all that were `made`, and the environment that leads to it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.clusters, server.made = {}, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "users": [{"name": "test", "user": {"token": "word"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        }
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        try:
            yield server, {"KUBECONFIG": str(file)}
        finally:
            server.shutdown()
