"""Python's sockets and http.client against the control socket."""

import http.client
import json
import socket
import sys
import threading


def connect(path):
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(60)
    stream.connect(path)
    return stream


class Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("rto-agent", timeout=60)
        self.path = path

    def connect(self):
        self.sock = connect(self.path)


def body(cidr):
    return json.dumps({"cidrs": [cidr], "policy": "near"}).encode()


def head(length, more=b""):
    return (
        b"POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + more
        + b"content-length: %d\r\n\r\n" % length
    )


def half_a_request(path):
    """Closes its half in the middle of a request, so the server can only end the connection."""
    for text in [b"", b"POST /v1/ent", head(100), head(100) + b"{"]:
        stream = connect(path)
        stream.sendall(text)
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(1 << 16):
            pass
        stream.close()


def headers(path):
    for more in [b"".join(b"x-%d: y\r\n" % i for i in range(200)), b"x: " + b"y" * (1 << 20) + b"\r\n"]:
        stream = connect(path)
        try:
            stream.sendall(head(2, more) + b"{}")
        except OSError:
            pass  # It ends the connection before all of it is sent.
        assert stream.recv(12) == b"HTTP/1.1 431"
        stream.close()


def changes(path, client, count, failures):
    try:
        kept = Connection(path)
        for i in range(count):
            connection = kept if i % 2 else Connection(path)
            connection.request(
                "POST",
                "/v1/entries",
                body=body(f"10.{100 + client}.{i}.0/24"),
                headers={"content-type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, (answer.status, text)
    except Exception as failure:
        failures.append((client, repr(failure)))


def main(path, clients, count):
    half_a_request(path)
    headers(path)
    failures = []
    threads = [threading.Thread(target=changes, args=(path, client, count, failures)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    print("done")


main(sys.argv[1], *map(int, sys.argv[2:4]))
