"""Measurements hardly depend on the kind of server: one will do."""

from __future__ import annotations

from helpers.clusters import first_server

server_url = first_server
