// Go's net and net/http against the control socket.
package main

import (
	"bufio"
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

func connect(socket string) (*net.UnixConn, error) {
	connection, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return connection, connection.SetDeadline(time.Now().Add(time.Minute))
}

// Sends a request, closes the sending half and reads the answer; returns its status.
func halfClosed(socket, text string) (int, error) {
	connection, err := connect(socket)
	if err != nil {
		return 0, err
	}
	defer connection.Close()
	request := fmt.Sprintf("POST /v1/entries HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"+
		"content-length: %d\r\n\r\n%s", len(text), text)
	if _, err := connection.Write([]byte(request)); err != nil {
		return 0, err
	}
	if err := connection.CloseWrite(); err != nil {
		return 0, err
	}
	answer, err := http.ReadResponse(bufio.NewReader(connection), nil)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	_, err = io.ReadAll(answer.Body)
	return answer.StatusCode, err
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

func run(socket string, halves, clients, count int) error {
	for i := 0; i < halves; i++ {
		status, err := halfClosed(socket, body(fmt.Sprintf("10.92.%d.0/24", i)))
		if err != nil {
			return fmt.Errorf("half-closed %d: %w", i, err)
		}
		if status != 200 {
			return fmt.Errorf("half-closed %d: %d", i, status)
		}
	}
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
	var numbers [3]int
	for i := range numbers {
		number, err := strconv.Atoi(os.Args[2+i])
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		numbers[i] = number
	}
	if err := run(os.Args[1], numbers[0], numbers[1], numbers[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}
