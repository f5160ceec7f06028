// Go's net/http, which writes a body while it reads the answer.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

func ask(client *http.Client, method, path string, body io.Reader, expected int) error {
	request, err := http.NewRequest(method, "http://rto-agent"+path, body)
	if err != nil {
		return err
	}
	request.Header.Set("content-type", "application/json")
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return err
	}
	if answer.StatusCode != expected {
		return fmt.Errorf("%s %s: %d: %s", method, path, answer.StatusCode, text)
	}
	return nil
}

func run(socket string, times int) error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, "unix", socket)
	}
	for _, alone := range []bool{true, false} {
		transport := &http.Transport{DialContext: dial, DisableKeepAlives: alone}
		client := &http.Client{Transport: transport, Timeout: time.Minute}
		for i := 0; i < times; i++ {
			if err := ask(client, "POST", "/v1/reload", bytes.NewReader([]byte("{}")), 200); err != nil {
				return err
			}
		}
		// Chunked, as the length of such a reader is unknown.
		chunked := io.MultiReader(bytes.NewReader([]byte("{")), bytes.NewReader([]byte("}")))
		if err := ask(client, "POST", "/v1/reload", chunked, 200); err != nil {
			return err
		}
		if err := ask(client, "POST", "/v1/nothing", bytes.NewReader([]byte("{}")), 404); err != nil {
			return err
		}
		if err := ask(client, "GET", "/v1/status", nil, 200); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	times, err := strconv.Atoi(os.Args[2])
	if err == nil {
		err = run(os.Args[1], times)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}
