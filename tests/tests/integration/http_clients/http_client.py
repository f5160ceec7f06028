"""Python's http.client, which sends headers and body one after the other."""

import http.client
import json
import socket
import sys


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("rto-agent", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def ask(connection, method, path, body=None):
    headers = {"content-type": "application/json"}
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def ask_in_pieces(path):
    """Sends the body after other requests were answered. One engine answers in turn, so a premature answer would be there."""
    connection = Connection(path)
    connection.putrequest("POST", "/v1/reload")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "2")
    connection.endheaders()
    for _ in range(2):
        other = Connection(path)
        assert ask(other, "POST", "/v1/reload", b"{}")[0] == 200
        other.close()
    connection.send(b"{}")
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()
    connection.close()


def main(path, times):
    for _ in range(times // 10):
        ask_in_pieces(path)
    for _ in range(times):
        connection = Connection(path)
        status, answer = ask(connection, "POST", "/v1/reload", b"{}")
        assert status == 200, (status, answer)
        connection.close()
    # All on one connection, with bodies that the server reads and bodies that it ignores.
    connection = Connection(path)
    for method, route, body, expected in [
        ("GET", "/v1/status", b"{}", 200),
        ("POST", "/v1/entries", b'{"cidrs": ["10.1.0.0/24"], "policy": "near"}', 200),
        ("GET", "/v1/entries", None, 200),
        ("POST", "/v1/entries/remove", b'{"cidrs": ["10.1.0.0/24"]}', 200),
        ("POST", "/v1/nothing", b"{}", 404),
        ("PUT", "/v1/status", b"{}", 405),
        ("POST", "/v1/reload", None, 200),
        # Chunked, as the length is unknown.
        ("POST", "/v1/reload", iter([b"{", b"}"]), 200),
    ]:
        status, answer = ask(connection, method, route, body)
        assert status == expected, (method, route, status, answer)
    print("done")


main(sys.argv[1], int(sys.argv[2]))
