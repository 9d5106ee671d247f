// The Go client against a broker: runs every check and reports one line for each.
//
// Arguments: the service URL, a prefix for topic names and, optionally, the beginning of the names of the checks to run.
// The words written to standard output are explained in run.py, which starts this program and answers its requests.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// World is what a check works with.
type World struct {
	client pulsar.Client
	url    string
	prefix string
	driver *bufio.Reader
}

// Broken is what a check panics with when a promise does not hold.
type Broken struct{ why string }

func broken(format string, arguments ...any) {
	panic(Broken{fmt.Sprintf(format, arguments...)})
}

func must(err error, what string) {
	if err != nil {
		broken("%s: %v", what, err)
	}
}

func need(holds bool, format string, arguments ...any) {
	if !holds {
		broken(format, arguments...)
	}
}

func (w *World) topic(name string) string {
	return w.prefix + "-" + name
}

// ask has the driver do something and returns what it answers.
func (w *World) ask(request string) string {
	fmt.Println("do " + request)
	line, err := w.driver.ReadString('\n')
	must(err, "the driver's answer")
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	need(word == "done", "%s: %s", request, line)
	return rest
}

func run(w *World, name string, check func(*World)) (passed bool) {
	began := time.Now()
	defer func() {
		if trouble := recover(); trouble != nil {
			why, isBroken := trouble.(Broken)
			if !isBroken {
				panic(trouble)
			}
			fmt.Printf("fail %s %s\n", name, strings.ReplaceAll(why.why, "\n", " "))
		}
	}()
	check(w)
	fmt.Printf("pass %s (%.1f s)\n", name, time.Since(began).Seconds())
	return true
}

func main() {
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1], OperationTimeout: 30 * time.Second})
	if err != nil {
		fmt.Println("fail connect", err)
		os.Exit(1)
	}
	w := &World{client: client, url: os.Args[1], prefix: os.Args[2], driver: bufio.NewReader(os.Stdin)}
	wanted := ""
	if len(os.Args) > 3 {
		wanted = os.Args[3]
	}
	code := 0
	for _, each := range checks() {
		if strings.HasPrefix(each.name, wanted) && !run(w, each.name, each.check) {
			code = 1
		}
	}
	client.Close()
	os.Exit(code)
}
