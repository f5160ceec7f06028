"""Requests at a fixed rate, each over a new connection, whatever happens to earlier ones; and a server for gRPC.

Prints how long each took, microseconds; "failed" precedes the time of a request without a response.
"""

import sys
import threading
import time

TIMEOUT_S = 2


def http(host, port):
    import http.client

    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request("GET", "/")
    connection.getresponse().read()
    connection.close()


def redis(host, port):
    import redis

    with redis.Redis(host, port, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
        client.get("key")


def grpc(host, port):
    import grpc

    # Without the option, channels of a process share their connections.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"{host}:{port}", options) as channel:
        channel.unary_unary("/lab.Echo/Echo")(b"a", timeout=TIMEOUT_S)


def serve(host, port):
    from concurrent import futures

    import grpc

    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("lab.Echo", {"Echo": echo})])
    server.add_insecure_port(f"{host}:{port}")
    server.start()
    server.wait_for_termination()


def main():
    call, host, port = globals()[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    if call is serve:
        return serve(host, port)
    count, rate = int(sys.argv[4]), float(sys.argv[5])

    def one(due):
        time.sleep(max(0, due - time.monotonic()))
        begun = time.monotonic()
        failed = ""
        try:
            call(host, port)
        except Exception:
            failed = "failed "
        return f"{failed}{round((time.monotonic() - begun) * 1e6)}\n"

    # The first call also imports the library.
    one(time.monotonic())
    begin = time.monotonic() + 0.1
    threads = [threading.Thread(target=lambda due: sys.stdout.write(one(due)), args=[begin + n / rate]) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
