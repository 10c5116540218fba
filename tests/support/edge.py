"""nginx and HAProxy in front of the gateway, as people put them there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import httpx

from support.process import Server, free_port

NGINX = """
daemon off;
error_log stderr;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass {upstream};
      {more}
    }}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  {more}
frontend edge
  bind 127.0.0.1:{port}
  default_backend gateway
backend gateway
  server one {address}
"""
KINDS = {
    "nginx as installed": ("nginx", ""),
    "nginx, HTTP/1.1": ("nginx", 'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_read_timeout 600s;'),
    "HAProxy": ("haproxy", ""),
    "HAProxy, no delay": ("haproxy", "option http-no-delay"),
}


class Edge(Server):
    def __init__(self, kind: str, upstream: str):
        program, more = KINDS[kind]
        self.folder = tempfile.mkdtemp(prefix="tidegate-edge-")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        file = Path(self.folder, f"{program}.conf")
        template = NGINX if program == "nginx" else HAPROXY
        address = upstream.removeprefix("http://")
        file.write_text(template.format(folder=self.folder, port=port, upstream=upstream, address=address, more=more))
        binary = shutil.which(program, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
        command = [binary, "-c", str(file)] if program == "nginx" else [binary, "-db", "-f", str(file)]
        super().__init__(program, command)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/").status_code > 0
        except httpx.TransportError:
            return False

    def stop(self, grace: float = 5) -> int:
        code = super().stop(grace)
        shutil.rmtree(self.folder, ignore_errors=True)
        return code
