// Go's net and net/http against the control socket.
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
	"strings"
	"time"
)

func body(cidr string) string {
	return fmt.Sprintf(`{"cidrs": [%q], "policy": "near"}`, cidr)
}

func post(client *http.Client, text string, more map[string]string) (int, error) {
	request, err := http.NewRequest("POST", "http://rto-agent/v1/entries", bytes.NewReader([]byte(text)))
	if err != nil {
		return 0, err
	}
	request.Header.Set("content-type", "application/json")
	for name, value := range more {
		request.Header.Set(name, value)
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	_, err = io.ReadAll(answer.Body)
	return answer.StatusCode, err
}

func changes(client *http.Client, number, count int) error {
	for i := 0; i < count; i++ {
		status, err := post(client, body(fmt.Sprintf("10.%d.%d.0/24", 100+number, i)), nil)
		if err != nil {
			return err
		}
		if status != 200 {
			return fmt.Errorf("client %d, change %d: %d", number, i, status)
		}
	}
	return nil
}

func run(socket string, clients, count int) error {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, "unix", socket)
	}
	transport := &http.Transport{DialContext: dial, MaxIdleConnsPerHost: clients}
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	many := map[string]string{}
	for i := 0; i < 200; i++ {
		many[fmt.Sprintf("x-%d", i)] = "y"
	}
	for _, headers := range []map[string]string{many, {"x": strings.Repeat("y", 1<<20)}} {
		// The server may close the connection before everything is sent.
		if status, err := post(client, "{}", headers); err == nil && status != 431 {
			return fmt.Errorf("headers: %d", status)
		}
	}
	ended := make(chan error)
	for i := 0; i < clients; i++ {
		go func(number int) { ended <- changes(client, number, count) }(i)
	}
	var failed error
	for i := 0; i < clients; i++ {
		if err := <-ended; err != nil {
			failed = err
		}
	}
	return failed
}

func main() {
	var numbers [2]int
	for i := range numbers {
		number, err := strconv.Atoi(os.Args[2+i])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		numbers[i] = number
	}
	if err := run(os.Args[1], numbers[0], numbers[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}
